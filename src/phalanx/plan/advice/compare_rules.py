"""Comparison of published rules of thumb with the planner: which rules apply, and whether they agree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from phalanx.cost.exact.model_state import model_state_bytes, optimizer_kind, state_bytes
from phalanx.cost.exact.parameters import count_parameters
from phalanx.plan.advice.rules_of_thumb import RULES, RuleOfThumb, RunSituation
from phalanx.plan.search.candidates import CandidateLayout, candidate_from_run
from phalanx.plan.search.enumerate_layouts import enumerate_layouts
from phalanx.plan.search.evaluate import can_run, evaluate
from phalanx.plan.search.explain import describe_memory_use, explain_slowdown, suggest_fit
from phalanx.plan.search.oom_risk import MAX_OOM_PROBABILITY, process_bytes
from phalanx.plan.search.result import EvaluatedLayout
from phalanx.plan.search.search import (
    MemoryCounts,
    TimeBands,
    runnable_layouts,
    search_layouts,
    smallest_layout,
    with_smaller_variants,
)
from phalanx.spec.errors import UserError
from phalanx.spec.formatting import GIB
from phalanx.spec.layout import Layout
from phalanx.spec.parameter_shapes import num_elements, parameter_shapes
from phalanx.spec.resolved_run import ResolvedRun
from phalanx.spec.run import RunSpec

AGREEMENT_TOLERANCE = 0.01
"""Relative slowdown below which a rule agrees, for the best layout that satisfies it.

80 of 100 steps differ from their prediction by up to a tenth.
"""
Verdict = Literal["agrees", "costs", "does not fit", "does not run"]


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Rule that applies, compared with the planner's best layout."""

    rule: RuleOfThumb
    why_rule_applies: str
    verdict: Verdict
    reason: str
    evaluated: EvaluatedLayout | None = None
    """Fastest layout that satisfies the rule and fits; the smallest, if none fits."""
    slower: float = 0.0
    """Relative slowdown of its step compared with the best one; 0 if it does not fit or run."""
    more_bytes: float = 0.0
    """Additional memory of its fullest rank, compared with the best layout."""


@dataclass(frozen=True)
class AdviceReport:
    """All advice for a run."""

    situation: RunSituation
    best: EvaluatedLayout
    advice: list[Advice]
    inapplicable_rules: list[RuleOfThumb]
    """Rules that do not apply."""

    @property
    def num_agreeing(self) -> int:
        """Number of rules that agree with the planner."""
        return sum(advice.verdict == "agrees" for advice in self.advice)


def advise(resolved: ResolvedRun) -> AdviceReport:
    """Return all rules of thumb, compared with the planner's search.

    Raises UserError if a speed of the cluster is unknown, or no layout fits.
    """
    layouts = enumerate_layouts(resolved)
    layouts, ordered = with_smaller_variants(resolved, layouts) if layouts else ([], [])
    evaluated = EvaluatedLayouts(resolved, layouts, ordered, MemoryCounts(resolved))
    fastest = evaluated.best(lambda _: True)
    if fastest is None:
        plan = search_layouts(resolved, keep=1)
        fix = suggest_fit(resolved, plan) if plan.closest_to_fitting else "change the layout or the batch size"
        raise UserError(
            "layout", None, f"cannot be chosen: none of {plan.searched:,} fits (see also `phalanx advise oom`)", fix=fix
        )
    bands = TimeBands(resolved, ordered, fastest)
    best = next(runnable_layouts(resolved, bands, bands.order, evaluated.count_memory))
    situation = describe_situation(evaluated)
    return AdviceReport(
        situation,
        best,
        advice=[compare_with_best(evaluated, best, situation, rule) for rule in RULES if rule.applies(situation)],
        inapplicable_rules=[rule for rule in RULES if not rule.applies(situation)],
    )


@dataclass(frozen=True)
class EvaluatedLayouts:
    """All layouts of a run."""

    resolved: ResolvedRun
    candidates: list[CandidateLayout]
    fitting: list[CandidateLayout]
    """Layouts that are likely to fit, in the planner's order of preference."""
    count_memory: MemoryCounts
    """Counts of all rules, many of which have the same best layouts."""

    def best(self, is_wanted: Callable[[CandidateLayout], bool]) -> EvaluatedLayout | None:
        """Return the planner's best of the wanted layouts; None if none of them fits and runs."""
        wanted = (candidate for candidate in self.fitting if is_wanted(candidate))
        return next(runnable_layouts(self.resolved, wanted, count_memory=self.count_memory), None)


def compare_with_best(
    layouts: EvaluatedLayouts, best: EvaluatedLayout, situation: RunSituation, rule: RuleOfThumb
) -> Advice:
    """Return the comparison of a rule that applies with the planner's best layout."""

    def obeys_rule(candidate: CandidateLayout) -> bool:
        return rule.is_satisfied_by(candidate, situation.domain)

    def make_advice(
        verdict: Verdict, reason: str, evaluated: EvaluatedLayout | None = None, slower: float = 0.0
    ) -> Advice:
        return Advice(
            rule=rule,
            why_rule_applies=rule.evidence(situation),
            verdict=verdict,
            reason=reason,
            evaluated=evaluated,
            slower=slower,
            more_bytes=evaluated.memory_bytes - best.memory_bytes if evaluated else 0.0,
        )

    if obeys_rule(best.candidate):
        # The reason is the cost of the fastest layout that does not satisfy the rule.
        fastest_violation = layouts.best(lambda candidate: not obeys_rule(candidate))
        if fastest_violation is not None:
            slowdown = explain_slowdown(layouts.resolved.run, fastest_violation, best)
            return make_advice("agrees", f"otherwise {fastest_violation.candidate}, {slowdown}", best)
        all_satisfy = all(map(obeys_rule, layouts.candidates))
        return make_advice("agrees", "all layouts satisfy the rule" if all_satisfy else "no other layout fits", best)
    if evaluated := layouts.best(obeys_rule):
        slower = evaluated.step_seconds / best.step_seconds - 1
        verdict: Verdict = "agrees" if slower < AGREEMENT_TOLERANCE else "costs"
        return make_advice(verdict, explain_slowdown(layouts.resolved.run, evaluated, best), evaluated, slower)
    obeying = list(filter(obeys_rule, layouts.candidates))
    if not obeying:
        required = rule.requirements_text
        reason = f"no layout of {situation.ranks} devices for this model and this batch has {required}"
        return make_advice("does not run", reason)
    smallest = evaluate(layouts.resolved, [smallest_layout(layouts.resolved, obeying)])[0]
    if smallest.p_oom < MAX_OOM_PROBABILITY:
        return make_advice("does not run", f"none of the {len(obeying):,} such layouts that fit can run")
    return make_advice("does not fit", _explain_missing_memory(layouts.resolved.run, smallest), smallest)


def _explain_missing_memory(run: RunSpec, smallest: EvaluatedLayout) -> str:
    """Return the memory that the smallest of some layouts needs, by part."""
    cluster = run.cluster
    part_bytes = _fullest_stage_bytes(smallest)
    # As describe_memory_use adds them.
    if libraries := 0.0 if cluster.calibration else process_bytes(cluster, 0):
        part_bytes = part_bytes | {"driver and libraries": libraries}
    largest_parts = sorted(part_bytes.items(), key=lambda part: -part[1])
    parts = ", ".join(f"{part} {size / GIB:.1f}" for part, size in largest_parts)
    return (
        f"the smallest such layout uses {describe_memory_use(cluster, smallest)}, "
        f"but the limit is {MAX_OOM_PROBABILITY:.0%}; device memory in GiB: {parts}"
    )


def describe_situation(layouts: EvaluatedLayouts) -> RunSituation:
    """Return the facts of a run that the rules depend on."""
    run = layouts.resolved.run
    model = run.model
    plain = candidate_from_run(ResolvedRun(run.replace(layout=Layout(micro_batch_size=1)), 1))
    on_one_device = evaluate(ResolvedRun(run, 1), [plain, plain._replace(activation_checkpointing="full")])
    resident_bytes, recomputed_bytes = (_fullest_stage_bytes(evaluated) for evaluated in on_one_device)
    fits_one_device = any(evaluated.p_oom < MAX_OOM_PROBABILITY for evaluated in on_one_device)
    count = count_parameters(model)
    optimizer = optimizer_kind(run.optimizer)
    state = model_state_bytes(count, optimizer, run.training.precision)
    block_parameters: Counter[str] = Counter()
    for name, shape in parameter_shapes(model).items():
        if name.startswith("blocks."):
            block_parameters[name.split(".")[1]] += num_elements(shape)
    bytes_per_parameter = state_bytes("adamw" if optimizer == "muon" else optimizer, run.training.precision).total
    block_state_bytes = bytes_per_parameter * max(block_parameters.values())
    # Whether the fastest fitting 1F1B pipeline still fits with ZB-H2.
    fits_with_zb_h2 = False
    if not fits_one_device and (fastest := layouts.best(lambda c: c.pp > 1 and c.schedule == "1f1b")):
        zb_h2 = fastest.candidate._replace(schedule="zb-h2")
        fits_with_zb_h2 = can_run(layouts.resolved, zb_h2)
        fits_with_zb_h2 = fits_with_zb_h2 and evaluate(layouts.resolved, [zb_h2])[0].p_oom < MAX_OOM_PROBABILITY
    return RunSituation(
        parameters=count.total,
        layers=model.num_layers,
        experts=model.moe is not None,
        sequences=run.training.tokens_per_step // run.training.seq_len,
        ranks=layouts.resolved.world_size,
        domain=run.cluster.fast_link_domain_size,
        memory_bytes=float(run.cluster.rank_memory_bytes or 0),
        state={"parameters": state.parameters, "gradients": state.gradients, "optimizer": state.optimizer},
        activation_bytes=resident_bytes["activations"] + resident_bytes["logits"],
        recomputed_bytes=recomputed_bytes["activations"] + recomputed_bytes["logits"],
        layer_bytes=block_state_bytes + resident_bytes["activations"] / model.num_blocks,
        fits_one_device=fits_one_device,
        fits_with_zb_h2=fits_with_zb_h2,
    )


def _fullest_stage_bytes(evaluated: EvaluatedLayout) -> dict[str, float]:
    """Return the bytes by part of the fullest stage."""
    return max(evaluated.stages.values(), key=lambda stage: sum(stage.values()))

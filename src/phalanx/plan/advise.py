"""Published rules of thumb beside what the planner says: which apply to a run, whether they agree, and why."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Literal

from phalanx.cost.memory import model_state_bytes, optimizer_of, state_bytes
from phalanx.cost.parameters import parameters
from phalanx.cost.shapes import elements, parameter_shapes
from phalanx.plan.candidates import Candidate, candidates
from phalanx.plan.explain import nearest_fit, why
from phalanx.plan.rules import GIB, RULES, Rule, Situation
from phalanx.plan.search import LIKELY, Option, Plan, can_run, evaluate, search
from phalanx.spec.errors import UserError
from phalanx.spec.run import RunSpec

ALIKE = 0.01
"""A rule agrees if the best layout that obeys it is slower by less: 80 of 100 steps differ from their prediction by up
to a tenth."""
Verdict = Literal["agrees", "costs", "does not fit", "does not run"]


@dataclass(frozen=True)
class Advice:
    """A rule that applies, beside the planner's best."""

    rule: Rule
    because: str
    verdict: Verdict
    option: Option | None
    """The fastest layout that obeys the rule and fits; the smallest, where none fits."""
    slower: float
    """Time of its step beyond the best one's, as a share of that; of what does not fit or run 0."""
    more_bytes: float
    """Memory of its fullest rank beyond that of the best layout's."""
    reason: str


@dataclass(frozen=True)
class Advised:
    """All that is said of a run."""

    situation: Situation
    best: Option
    advice: list[Advice]
    silent: list[Rule]
    """Rules that do not apply."""

    @property
    def agreeing(self) -> int:
        """Rules that agree with the planner."""
        return sum(advice.verdict == "agrees" for advice in self.advice)


def advise(run: RunSpec, world_size: int) -> Advised:
    """Every rule of thumb, held against the planner's search.

    Raises UserError for a cluster whose speeds are not known, and where no layout fits.
    """
    found = candidates(run, world_size)
    plan = search(run, world_size, keep=1, among=found)
    if not plan.options:
        fix = nearest_fit(run, world_size, plan) if plan.smallest else "change the layout's choices or the batch"
        raise UserError("layout", None, f"no layout of {plan.considered:,} fits; see also `phalanx advise oom`", fix)
    here, best = situation(run, world_size, found), plan.options[0]
    applying = [(rule, because) for rule in RULES if (because := rule.applies(here))]
    advice = [held_against(run, here, rule, because, found, best) for rule, because in applying]
    spoken = [rule for rule, _ in applying]
    return Advised(here, best, advice, [rule for rule in RULES if rule not in spoken])


def held_against(
    run: RunSpec, here: Situation, rule: Rule, because: str, found: list[Candidate], best: Option
) -> Advice:
    """A rule that applies beside the planner's best layout."""
    obeying = [candidate for candidate in found if rule.obeyed(candidate, here.domain)]
    if rule.obeyed(best.candidate, here.domain):
        return Advice(rule, because, "agrees", best, 0.0, 0.0, _otherwise(run, here, rule, found, best))
    if not obeying:
        reason = f"no layout of {here.ranks} devices, this batch and this model has {rule.partial}"
        return Advice(rule, because, "does not run", None, 0.0, 0.0, reason)
    plan = search(run, here.ranks, keep=1, among=obeying)
    if not plan.options:
        return _unfit(rule, because, here, plan, best)
    option = plan.options[0]
    slower, more = option.step_seconds / best.step_seconds - 1, option.memory_bytes - best.memory_bytes
    verdict: Verdict = "agrees" if slower < ALIKE else "costs"
    return Advice(rule, because, verdict, option, slower, more, why(run, option, best))


def _otherwise(run: RunSpec, here: Situation, rule: Rule, found: list[Candidate], best: Option) -> str:
    """Why the planner does what a rule says: what the fastest layout that does not would take."""
    others = [candidate for candidate in found if not rule.obeyed(candidate, here.domain)]
    if not others:
        return "all layouts are so"
    options = search(run, here.ranks, keep=1, among=others).options
    if not options:
        return "no other layout fits"
    return f"otherwise {options[0].candidate}, {why(run, options[0], best)}"


def _unfit(rule: Rule, because: str, here: Situation, plan: Plan, best: Option) -> Advice:
    """Of a rule that no layout obeys that fits and runs."""
    smallest = plan.smallest
    if smallest is None:
        reason = f"of {plan.considered:,} such layouts the {plan.fitting:,} that fit cannot run"
        return Advice(rule, because, "does not run", None, 0.0, 0.0, reason)
    held = sorted(_fullest(smallest).items(), key=lambda part: -part[1])
    parts = ", ".join(f"{part} {size / GIB:.1f}" for part, size in held)
    reason = (
        f"the smallest such layout takes {smallest.memory_bytes / GIB:.1f} GiB ({parts}), a device has "
        f"{here.memory_bytes / GIB:.1f}, not all of it free: P(OOM) {smallest.p_oom:.0%}, and {LIKELY:.0%} is too much"
    )
    return Advice(rule, because, "does not fit", smallest, 0.0, smallest.memory_bytes - best.memory_bytes, reason)


def situation(run: RunSpec, world_size: int, found: list[Candidate]) -> Situation:
    """What the rules look at; `found` are all layouts of the run.

    Raises UserError for a cluster whose speeds are not known.
    """
    model, training, cluster = run.model, run.training, run.cluster
    sequences = training.tokens_per_step // training.sequence
    plain = Candidate("ddp", 1, 1, 1, 1, 1, 1, 1, sequences, "none", "1f1b", 1)
    one = evaluate(run, 1, [plain, replace(plain, recompute="full")])
    held, again = (_fullest(option) for option in one)
    optimizer, count = optimizer_of(run.optimizer), parameters(model)
    state = model_state_bytes(count, optimizer, training.precision)
    each = state_bytes("adamw" if optimizer == "muon" else optimizer, training.precision).total
    return Situation(
        parameters=count.total,
        layers=model.layers,
        experts=model.moe is not None,
        sequences=sequences,
        ranks=world_size,
        domain=cluster.domain or cluster.nproc or 1,
        memory_bytes=float(cluster.memory_bytes or 0),
        state={"parameters": state.parameters, "gradients": state.gradients, "optimizer": state.optimizer},
        activation_bytes=held["activations"] + held["logits"],
        recomputed_bytes=again["activations"] + again["logits"],
        layer_bytes=each * _largest_block(run) + held["activations"] / model.layers,
        alone=(alone := any(option.p_oom < LIKELY for option in one)),
        spare=not alone and _spare(run, world_size, found),
    )


def _fullest(option: Option) -> dict[str, float]:
    """Bytes by part of the stage that has most."""
    return max(option.stages.values(), key=lambda stage: sum(stage.values()))


def _largest_block(run: RunSpec) -> int:
    """Parameters of the block that has most."""
    blocks: Counter[str] = Counter()
    for name, shape in parameter_shapes(run.model).items():
        owner, _, rest = name.partition(".")
        if owner == "blocks":
            blocks[rest.partition(".")[0]] += elements(shape)
    return max(blocks.values())


def _spare(run: RunSpec, world_size: int, found: list[Candidate]) -> bool:
    """Whether the fastest 1F1B pipeline that fits still does with ZB-H2 in place of 1F1B."""
    pipelines = [candidate for candidate in found if candidate.pp > 1 and candidate.schedule == "1f1b"]
    fastest = search(run, world_size, keep=1, among=pipelines).options if pipelines else []
    if not fastest:
        return False
    other = replace(fastest[0].candidate, schedule="zb-h2")
    return can_run(run, world_size, other) and evaluate(run, world_size, [other])[0].p_oom < LIKELY

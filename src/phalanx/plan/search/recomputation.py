"""Recomputation that fits in memory, with the lowest step time: `layout.activation_checkpointing = "auto"`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from phalanx.cost.exact.flops import run_recomputed_flops_per_token
from phalanx.cost.exact.rank_memory import worker_memories
from phalanx.plan.search.candidates import candidate_from_run
from phalanx.plan.search.evaluate import evaluate
from phalanx.plan.search.oom_risk import SAFE_OOM_PROBABILITY, ranks_oom_probability
from phalanx.program.pipeline_split import layers_per_rank
from phalanx.spec.errors import UserError
from phalanx.spec.layout import CheckpointingName, Layout
from phalanx.spec.resolved_run import ResolvedRun


@dataclass(frozen=True, kw_only=True)
class RecomputationChoice:
    """Layout with a method of recomputation, and its predicted cost."""

    layout: Layout
    p_oom: float
    """Probability that memory is insufficient for the fullest rank."""
    step_seconds: float | None
    """Step time; None if the planner cannot predict it."""


def choose_recomputation(resolved: ResolvedRun) -> RecomputationChoice:
    """Return the run's layout with the recomputation that fits in memory and has the lowest step time.

    A choice fits if its P(OOM), by the exact memory, is below `SAFE_OOM_PROBABILITY`. Candidates are no recomputation,
    and each method with the fewest blocks per pipeline rank that fit. If none fits, all blocks are recomputed in full.
    If step times are unknown, the choice recomputes the fewest FLOPs. The memory of the cluster must be known. Raises
    UserError if the layout cannot run.
    """
    run = resolved.run
    blocks = [len(layers) for layers in layers_per_rank(run)]
    plain = with_recomputation(resolved, "none", blocks)
    fits_plain = _find_fitting_ranks(plain)
    if all(fits_plain):
        return _evaluate_choice(plain)
    methods: tuple[CheckpointingName, ...] = ("norms", "selective", "full")
    # FSDP units inside blocks do not recompute norms.
    if run.layout.fsdp_unit == "sublayer":
        methods = methods[1:]
    sufficient = [_recompute_fewest_blocks(resolved, method, blocks, fits_plain) for method in methods]
    candidates = [_evaluate_choice(candidate) for candidate in sufficient if candidate is not None]
    if not candidates:
        return _evaluate_choice(with_recomputation(resolved, "full", blocks))

    def cost(choice: RecomputationChoice) -> tuple[float, float]:
        flops = run_recomputed_flops_per_token(run.model_copy(update={"layout": choice.layout}))
        return inf if choice.step_seconds is None else choice.step_seconds, flops

    return min(candidates, key=cost)


def with_recomputation(resolved: ResolvedRun, method: CheckpointingName, counts: Sequence[int]) -> ResolvedRun:
    """Return the run with a method of recomputation in the first blocks of each pipeline rank."""
    blocks = [len(layers) for layers in layers_per_rank(resolved.run)]
    method = method if any(counts) else "none"
    recomputed: int | tuple[int, ...] | None = tuple(counts)
    if method == "none" or list(counts) == blocks:
        recomputed = None
    elif len(set(counts)) == 1:
        recomputed = counts[0]
    changes = {"activation_checkpointing": method, "recomputed_blocks": recomputed, "auto_checkpointing": False}
    return resolved.with_layout(resolved.layout.model_copy(update=changes))


def _recompute_fewest_blocks(
    resolved: ResolvedRun, method: CheckpointingName, blocks: Sequence[int], fits_plain: Sequence[bool]
) -> ResolvedRun | None:
    """Return the run with the fewest recomputed blocks that fit on each pipeline rank; None if all do not suffice.

    The memory of a rank depends on its own blocks, so one bisection serves all ranks.
    """
    all_recomputed = with_recomputation(resolved, method, blocks)
    if not all(_find_fitting_ranks(all_recomputed)):
        return None
    # With some blocks, the units of FSDP would differ from block to block.
    if method == "full" and resolved.layout.fsdp_unit == "sublayer":
        return all_recomputed
    low = [0 if fits else 1 for fits in fits_plain]
    high = [0 if fits else count for fits, count in zip(fits_plain, blocks, strict=True)]
    while low != high:
        middle = [(fewest + most) // 2 for fewest, most in zip(low, high, strict=True)]
        for rank, fits in enumerate(_find_fitting_ranks(with_recomputation(resolved, method, middle))):
            if low[rank] < high[rank] and fits:
                high[rank] = middle[rank]
            elif low[rank] < high[rank]:
                low[rank] = middle[rank] + 1
    return with_recomputation(resolved, method, high)


def _find_fitting_ranks(resolved: ResolvedRun) -> list[bool]:
    """Return whether each pipeline rank almost certainly fits in memory."""
    return [
        ranks_oom_probability(resolved.run.cluster, [memory]) < SAFE_OOM_PROBABILITY
        for memory in worker_memories(resolved)
    ]


def _evaluate_choice(resolved: ResolvedRun) -> RecomputationChoice:
    p_oom = ranks_oom_probability(resolved.run.cluster, worker_memories(resolved))
    try:
        step_seconds = evaluate(resolved, [candidate_from_run(resolved)])[0].step_seconds
    except UserError:  # for example, the speeds of the machine are unknown
        step_seconds = None
    return RecomputationChoice(layout=resolved.layout, p_oom=p_oom, step_seconds=step_seconds)

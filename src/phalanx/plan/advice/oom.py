"""OOM diagnosis: the effect of each remedy on its own, and of several in sequence until a run fits.

Memory is Phalanx's exact count (`cost.exact.rank_memory`) on the fullest rank, not the planner's estimate for any
trainer. The limits of fitting are the planner's, and times are the planner's too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import inf

from phalanx.cost.exact.rank_memory import RankMemory, worker_memories
from phalanx.plan.advice.oom_remedies import REMEDIES, Remedy, increase_pp, with_layout
from phalanx.plan.search.candidates import candidate_from_run
from phalanx.plan.search.evaluate import evaluate
from phalanx.plan.search.oom_risk import SAFE_OOM_PROBABILITY, ranks_oom_probability, safe_capacity_bytes
from phalanx.plan.search.result import EvaluatedLayout
from phalanx.plan.search.search import search_layouts
from phalanx.program.pipeline_split import layers_per_rank
from phalanx.spec.errors import UserError
from phalanx.spec.resolved_run import ResolvedRun
from phalanx.spec.run import RunSpec

PARTS = ("parameters", "gradients", "optimizer", "activations", "communication")
MIN_FREED_FRACTION = 0.01
"""Minimum freed fraction of memory for which a change becomes a step of the sequence."""
NEGLIGIBLE_FRACTION = 0.001
"""Freed fraction of memory below which a change is said to have no effect, such as the ids of fewer micro-batches."""


@dataclass(frozen=True)
class RunFootprint:
    """Cost of a run: bytes of its fullest rank, and the seconds of its step."""

    run: RunSpec
    memory: RankMemory
    p_oom: float

    @cached_property
    def step_seconds(self) -> float | None:
        """Step time; None if the planner cannot predict it.

        Unknown are machines without speeds, precisions without calibration, and unsupported options.
        """
        resolved = ResolvedRun.on_cluster(self.run)
        try:
            return evaluate(resolved, [candidate_from_run(resolved)])[0].step_seconds
        except UserError:
            return None

    @property
    def fits(self) -> bool:
        """True if memory is almost certainly sufficient."""
        return self.p_oom < SAFE_OOM_PROBABILITY


@dataclass(frozen=True, kw_only=True)
class RemedyEffect:
    """Effect of a remedy on a run."""

    remedy: Remedy
    run: RunSpec | None
    """Changed run; None if the remedy is impossible."""
    settings: tuple[str, ...]
    """Changed settings, in the format of `--set`."""
    freed: Mapping[str, int]
    """Freed bytes by part at its peak; negative if a part grows."""
    freed_bytes: int
    """Freed bytes of the peak total, on the fullest rank."""
    new_footprint: RunFootprint | None
    problem: str = ""

    @property
    def cost(self) -> str:
        """Cost of the change; for a pipeline whose ranks have different numbers of layers, also these."""
        counts = [len(layers) for layers in layers_per_rank(self.run)] if self.run else []
        if self.remedy.changes is not increase_pp or len(set(counts)) < 2:
            return self.remedy.cost
        return f"{self.remedy.cost}; ranks have {min(counts)} to {max(counts)} layers"

    @property
    def helps(self) -> bool:
        """True if the run fits afterwards, or needs noticeably less memory."""
        after = self.new_footprint
        return after is not None and (after.fits or self.freed_bytes > NEGLIGIBLE_FRACTION * after.memory.device)


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Memory of a run, and remedies."""

    current_footprint: RunFootprint
    limit_bytes: float
    micro_batch: int
    single_remedies: list[RemedyEffect]
    """Each remedy alone, cheapest first: those that make the run fit, then those that only help."""
    steps: list[RemedyEffect]
    """Remedies in sequence; empty if the run fits."""
    needed: list[RemedyEffect]
    """Remedies of `steps` that are required; all of them, if they do not suffice."""
    best: EvaluatedLayout | None
    """Planner's best of all layouts on the same devices; None if it finds none."""


def diagnose(run: RunSpec) -> Diagnosis:
    """Return the memory of a run on its cluster, and the effect of every remedy alone and in sequence.

    Raises UserError if the layout cannot run, or the memory of the devices is unknown.
    """
    resolved = ResolvedRun.on_cluster(run)
    current = run_footprint(run)
    effects = evaluate_single_remedies(run)
    steps, needed = cheapest_sequence(run, current, effects)
    try:
        best = next(iter(search_layouts(resolved, keep=1).layouts), None)
    except UserError:
        best = None
    return Diagnosis(
        current_footprint=current,
        limit_bytes=limit_bytes(run),
        micro_batch=resolved.batch.micro_batch_size,
        single_remedies=cheapest_first(effects, current),
        steps=steps,
        needed=needed,
        best=best,
    )


def limit_bytes(run: RunSpec) -> float:
    """Return the maximum bytes of a run's tensors on a device with which its memory is likely to suffice.

    They exclude driver and libraries or, on a calibrated machine, the rest of the process. Raises UserError if the
    memory of the devices is unknown.
    """
    _require_known_memory(run)
    return safe_capacity_bytes(run.cluster)


def _require_known_memory(run: RunSpec) -> None:
    if run.cluster.rank_memory_bytes is None:
        fix = 'set cluster.memory_bytes, or cluster.preset (see `phalanx info --list`), such as "h100"'
        raise UserError("cluster.memory_bytes", None, "is unknown, but the limit depends on it", fix=fix)


def run_footprint(run: RunSpec) -> RunFootprint:
    """Return the cost of a run on its cluster's ranks.

    Raises UserError if the layout cannot run, or the memory of the devices is unknown.
    """
    rank_memories = worker_memories(ResolvedRun.on_cluster(run))
    _require_known_memory(run)
    p_oom = ranks_oom_probability(run.cluster, rank_memories)
    return RunFootprint(run, max(rank_memories, key=lambda rank_memory: rank_memory.device), p_oom)


def with_explicit_micro_batch(run: RunSpec) -> RunSpec:
    """Return the run with its effective micro-batch size set, so that no remedy changes it implicitly."""
    return with_layout(run, micro_batch_size=ResolvedRun.on_cluster(run).batch.micro_batch_size)


def evaluate_single_remedies(run: RunSpec) -> list[RemedyEffect]:
    """Return each remedy's effect on its own: the smallest sufficient change, or the most effective."""
    run = with_explicit_micro_batch(run)
    footprint = run_footprint(run)
    return [smallest_sufficient(remedy, run, run, footprint) for remedy in REMEDIES]


def relative_slowdown(effect: RemedyEffect, current: RunFootprint) -> float:
    """Return the relative increase of the step time; infinite if the planner cannot predict it."""
    new_step_seconds = effect.new_footprint.step_seconds if effect.new_footprint else None
    return new_step_seconds / current.step_seconds - 1 if new_step_seconds and current.step_seconds else inf


def cheapest_first(effects: Sequence[RemedyEffect], current: RunFootprint) -> list[RemedyEffect]:
    """Return the effects that make a run fit, then those that help, then those that free nothing.

    Each group is sorted by step time, with other costs last. The order is unchanged if times are unknown.
    """

    def preference(effect: RemedyEffect) -> tuple[int, bool, float]:
        rank = 0 if fits_after([effect]) else 1 if effect.helps else 2
        return rank, effect.remedy.is_last_resort, relative_slowdown(effect, current)

    return sorted(effects, key=preference)


def cheapest_sequence(
    run: RunSpec, current: RunFootprint, effects: Sequence[RemedyEffect]
) -> tuple[list[RemedyEffect], list[RemedyEffect]]:
    """Return a sequence of remedies after which a run fits, and the remedies in it that are required.

    Of several orders, the result is the one with the fastest run, preferably with remedies that only cost time. The
    orders are by cost of each remedy alone, the published order, and each remedy that suffices alone. This is not a
    full search, which is the planner's task.
    """
    by_cost = sorted(effects, key=lambda effect: (effect.remedy.is_last_resort, relative_slowdown(effect, current)))
    orders = [tuple(effect.remedy for effect in by_cost), REMEDIES]
    orders += [(effect.remedy,) for effect in effects if fits_after([effect])]
    sequences = [apply_until_fits(run, order) for order in dict.fromkeys(orders)]

    def preference(needed: list[RemedyEffect]) -> tuple[bool, float, bool, float]:
        if not needed:
            return True, inf, False, 0
        fits = fits_after(needed)
        final_footprint = needed[-1].new_footprint
        lacking_bytes = inf if final_footprint is None else final_footprint.memory.device
        has_last_resort = any(effect.remedy.is_last_resort for effect in needed)
        return not fits, 0 if fits else lacking_bytes, has_last_resort, relative_slowdown(needed[-1], current)

    pairs = [(sequence, minimal_subset(run, sequence)) for sequence in sequences]
    return min(pairs, key=lambda pair: preference(pair[1]))


def apply_until_fits(run: RunSpec, remedies: Sequence[Remedy] | None = None) -> list[RemedyEffect]:
    """Return the effects of remedies in sequence, until the run fits.

    Each is applied on top of the previous ones that freed enough. Its settings are all changes so far; its freed bytes
    are relative to the previous one.
    """
    current = with_explicit_micro_batch(run)
    footprint = run_footprint(run)
    effects = list[RemedyEffect]()
    for remedy in REMEDIES if remedies is None else remedies:
        if footprint.fits:
            break
        effect = smallest_sufficient(remedy, current, run, footprint)
        frees_enough = effect.freed_bytes > MIN_FREED_FRACTION * footprint.memory.device
        if effect.run is not None and effect.new_footprint and frees_enough:
            effects.append(effect)
            current = effect.run
            footprint = effect.new_footprint
    return effects


def minimal_subset(run: RunSpec, sequence: list[RemedyEffect]) -> list[RemedyEffect]:
    """Return the required remedies of a sequence that makes a run fit; the slowest are removed first."""
    if not fits_after(sequence):
        return sequence
    footprints = [run_footprint(run), *(effect.new_footprint for effect in sequence if effect.new_footprint)]
    added_seconds = [
        (after.step_seconds or 0.0) - (before.step_seconds or 0.0) for before, after in pairwise(footprints)
    ]
    remedies = [effect.remedy for effect in sequence]
    for _, dropped in sorted(zip(added_seconds, remedies, strict=True), key=lambda pair: -pair[0]):
        reduced_sequence = apply_until_fits(run, [effect.remedy for effect in sequence if effect.remedy is not dropped])
        if fits_after(reduced_sequence):
            sequence = reduced_sequence
    return sequence


def fits_after(sequence: list[RemedyEffect]) -> bool:
    """Return whether a run fits after these remedies."""
    return bool(sequence) and sequence[-1].new_footprint is not None and sequence[-1].new_footprint.fits


def smallest_sufficient(remedy: Remedy, run: RunSpec, original_run: RunSpec, before: RunFootprint) -> RemedyEffect:
    """Return the smallest sufficient change of a remedy, or the one that frees most.

    Settings are relative to `original_run`, and `before` is the cost of `run`.
    """
    insufficient: list[RemedyEffect] = []
    problem = remedy.no_change_reason
    for changed in remedy.changes(run):
        try:
            after = run_footprint(changed)
        except UserError as error:
            problem = str(error).partition("\n")[0]
            continue
        effect = RemedyEffect(
            remedy=remedy,
            run=changed,
            settings=changed_settings(original_run, changed),
            freed={part: getattr(before.memory, part) - getattr(after.memory, part) for part in PARTS},
            freed_bytes=before.memory.device - after.memory.device,
            new_footprint=after,
        )
        if after.fits:
            return effect
        insufficient.append(effect)
    impossible = RemedyEffect(
        remedy=remedy, run=None, settings=(), freed={}, freed_bytes=0, new_footprint=None, problem=problem
    )
    return max(insufficient, key=lambda effect: effect.freed_bytes, default=impossible)


def changed_settings(before: RunSpec, after: RunSpec) -> tuple[str, ...]:
    """Return the settings in which two runs differ, in the format of `--set`."""
    settings = []
    for table in ("training", "optimizer", "layout", "cluster", "adapter"):
        new_table = getattr(after, table)
        if new_table is None:
            continue
        defaults = {field: info.default for field, info in type(new_table).model_fields.items()}
        old_values = dict(getattr(before, table) or defaults)
        for field, value in new_table:
            if old_values[field] != value:
                settings.append(f"{table}.{field}={'' if value is None else value}")
    return tuple(settings)

"""Out of memory: what each remedy frees and costs on its own, and one after the other until a run fits.

Memory is what Phalanx itself would hold (`cost.exact.rank_memory`) on the fullest rank, not the planner's footprint of
any trainer; what of it fits is what the planner takes to fit. Times are the planner's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf

from phalanx.cost.exact.rank_memory import RankMemory, worker_memories
from phalanx.plan.advice.oom_remedies import REMEDIES, Remedy, with_layout
from phalanx.plan.search.candidates import candidate_from_run
from phalanx.plan.search.evaluate import evaluate
from phalanx.plan.search.oom_risk import SAFE_OOM_PROBABILITY, ranks_oom_probability, safe_capacity_bytes
from phalanx.plan.search.result import EvaluatedLayout
from phalanx.plan.search.search import search_layouts
from phalanx.spec.batch import plan_batch
from phalanx.spec.errors import UserError
from phalanx.spec.run import RunSpec

PARTS = ("parameters", "gradients", "optimizer", "activations", "communication")
MIN_FREED_FRACTION = 0.01
"""Step by step, a change that frees less than this share of what is held is not made."""


@dataclass(frozen=True)
class RunFootprint:
    """What a run takes: bytes of its fullest rank, and the seconds of its step."""

    memory: RankMemory
    p_oom: float
    step_seconds: float | None
    """None where the planner does not know: machines without speeds, precisions that they were not calibrated in,
    choices that it does not predict."""

    @property
    def fits(self) -> bool:
        """Whether memory is almost surely enough."""
        return self.p_oom < SAFE_OOM_PROBABILITY


@dataclass(frozen=True)
class RemedyEffect:
    """A remedy applied to a run."""

    remedy: Remedy
    run: RunSpec | None
    """As it is then; None where the remedy is not possible."""
    settings: tuple[str, ...]
    """What changed, as `--set` takes it."""
    freed: Mapping[str, int]
    """Bytes by part, each at its most; negative where more is held."""
    freed_bytes: int
    """Of the most at one time, on the fullest rank."""
    new_footprint: RunFootprint | None
    problem: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """A run's memory, and what would free some."""

    current_footprint: RunFootprint
    limit_bytes: float
    micro_batch: int
    single_remedies: list[RemedyEffect]
    """Cheapest first: those that make it fit, then those that help but do not suffice."""
    steps: list[RemedyEffect]
    """One after the other; empty where the run fits."""
    needed: list[RemedyEffect]
    """Of those the ones that it cannot do without; all, where they are not enough."""
    best: EvaluatedLayout | None
    """Of the planner, of all layouts on the same devices; None where it finds or knows none."""


def diagnose(run: RunSpec) -> Diagnosis:
    """What a run holds on its cluster, and every remedy alone and step by step.

    Raises UserError if its layout cannot run, or where the memory of its devices is not known.
    """
    now = run_footprint(run)
    effects = evaluate_single_remedies(run)
    made, needed = cheapest_sequence(run, now, effects)
    try:
        best = next(iter(search_layouts(run, run.cluster.ranks, keep=1).options), None)
    except UserError:
        best = None
    micro_batch = plan_batch(run, run.cluster.ranks).micro_batch_size
    return Diagnosis(
        now,
        limit_bytes(run),
        micro_batch,
        single_remedies=cheapest_first(effects, now),
        steps=made,
        needed=needed,
        best=best,
    )


def limit_bytes(run: RunSpec) -> float:
    """What a run's tensors may take on a device, so that its memory is likely to be enough: not what driver and
    libraries, or on a calibrated machine a process, have beside them.

    Raises UserError where the memory is not known.
    """
    if run.cluster.rank_memory_bytes is None:
        fix = 'set it, or cluster.preset (`phalanx info --list` shows them), such as "h100"'
        raise UserError("cluster.memory_bytes", None, "is not known, and what fits depends on it", fix=fix)
    return safe_capacity_bytes(run.cluster)


def run_footprint(run: RunSpec) -> RunFootprint:
    """What a run takes on its cluster's ranks.

    Raises UserError if its layout cannot run.
    """
    rank_memories = worker_memories(run, run.cluster.ranks)
    limit_bytes(run)
    p_oom = ranks_oom_probability(run.cluster, rank_memories)
    return RunFootprint(max(rank_memories, key=lambda rank_memory: rank_memory.device), p_oom, step_seconds(run))


def step_seconds(run: RunSpec) -> float | None:
    """The planner's time of a step, if it knows."""
    try:
        return evaluate(run, run.cluster.ranks, [candidate_from_run(run, run.cluster.ranks)])[0].step_seconds
    except UserError:
        return None


def with_explicit_micro_batch(run: RunSpec) -> RunSpec:
    """The run with the micro-batch that it has anyway, so that no remedy changes it unasked."""
    return with_layout(run, micro_batch_size=plan_batch(run, run.cluster.ranks).micro_batch_size)


def evaluate_single_remedies(run: RunSpec) -> list[RemedyEffect]:
    """Every remedy on its own: as little of it as fits, or else what frees most."""
    run = with_explicit_micro_batch(run)
    return [smallest_sufficient(remedy, run, run, before=run_footprint(run)) for remedy in REMEDIES]


def relative_slowdown(effect: RemedyEffect, now: RunFootprint) -> float:
    """The share by which a step takes longer than now; infinite where the planner does not know."""
    after = effect.new_footprint.step_seconds if effect.new_footprint else None
    return after / now.step_seconds - 1 if after and now.step_seconds else inf


def cheapest_first(effects: Sequence[RemedyEffect], now: RunFootprint) -> list[RemedyEffect]:
    """Those that make a run fit, by the step time that they cost; then likewise those that help but do not suffice;
    then those that free nothing. In each part those that cost something else too are last; the order stays as it was
    where times are not known."""

    def key(effect: RemedyEffect) -> tuple[int, bool, float]:
        fits_alone = effect.new_footprint is not None and effect.new_footprint.fits
        return (
            0 if fits_alone else 1 if effect.freed_bytes > 0 else 2,
            effect.remedy.is_last_resort,
            relative_slowdown(effect, now),
        )

    return sorted(effects, key=key)


def cheapest_sequence(
    run: RunSpec, now: RunFootprint, effects: Sequence[RemedyEffect]
) -> tuple[list[RemedyEffect], list[RemedyEffect]]:
    """Remedies one after the other until a run fits, and which of them it needs: of several orders the one that leaves
    the fastest run, if it can be with what costs time only. Tried are that of what each costs alone, the published one,
    and each that makes it fit alone: this is no search, which is the planner's."""
    by_cost = sorted(effects, key=lambda effect: (effect.remedy.is_last_resort, relative_slowdown(effect, now)))
    orders = [tuple(effect.remedy for effect in by_cost), REMEDIES]
    orders += [(effect.remedy,) for effect in effects if fits_after([effect])]
    paths = [
        (made, minimal_subset(run, made)) for made in (apply_until_fits(run, order) for order in dict.fromkeys(orders))
    ]

    def key(path: tuple[list[RemedyEffect], list[RemedyEffect]]) -> tuple[bool, float, bool, float]:
        needed = path[1]
        short = 0 if fits_after(needed) else remaining_bytes(needed)
        return (
            not fits_after(needed),
            short,
            any(effect.remedy.is_last_resort for effect in needed),
            relative_slowdown(needed[-1], now) if needed else 0,
        )

    return min(paths, key=key)


def remaining_bytes(made: list[RemedyEffect]) -> float:
    """Bytes that a run still holds after remedies that are not enough."""
    return made[-1].new_footprint.memory.device if made and made[-1].new_footprint else inf


def apply_until_fits(run: RunSpec, remedies: Sequence[Remedy] | None = None) -> list[RemedyEffect]:
    """One remedy after the other, in their order, until the run fits; each on top of those before that freed enough to
    be worth it.

    The settings of each are all that changed so far; what it frees is beyond the one before it.
    """
    current = with_explicit_micro_batch(run)
    footprint = run_footprint(run)
    effects = list[RemedyEffect]()
    for remedy in REMEDIES if remedies is None else remedies:
        if footprint.fits:
            break
        effect = smallest_sufficient(remedy, current, run, before=footprint)
        if (
            effect.run is not None
            and effect.new_footprint
            and effect.freed_bytes > MIN_FREED_FRACTION * footprint.memory.device
        ):
            effects.append(effect)
            current = effect.run
            footprint = effect.new_footprint
    return effects


def minimal_subset(run: RunSpec, made: list[RemedyEffect]) -> list[RemedyEffect]:
    """Of remedies with which a run fits, those that it needs: what costs most time is the first to be left out."""
    if not fits_after(made):
        return made
    before = [
        run_footprint(run).step_seconds,
        *(effect.new_footprint.step_seconds for effect in made if effect.new_footprint),
    ]
    added = [(after or 0.0) - (earlier or 0.0) for earlier, after in pairwise(before)]
    for _, dropped in sorted(zip(added, (effect.remedy for effect in made), strict=True), key=lambda item: -item[0]):
        fewer = apply_until_fits(run, [effect.remedy for effect in made if effect.remedy is not dropped])
        if fits_after(fewer):
            made = fewer
    return made


def fits_after(made: list[RemedyEffect]) -> bool:
    """Whether a run fits after these remedies."""
    return bool(made) and made[-1].new_footprint is not None and made[-1].new_footprint.fits


def smallest_sufficient(remedy: Remedy, run: RunSpec, since: RunSpec, before: RunFootprint) -> RemedyEffect:
    """As little of a remedy as makes a run fit, or what frees most; settings are named since another run."""
    tried: list[RemedyEffect] = []
    problem = remedy.no_change_reason
    for changed in remedy.changes(run):
        try:
            after = run_footprint(changed)
        except UserError as error:
            problem = str(error).partition("\n")[0]
            continue
        freed = {part: getattr(before.memory, part) - getattr(after.memory, part) for part in PARTS}
        total = before.memory.device - after.memory.device
        tried.append(
            RemedyEffect(
                remedy, changed, changed_settings(since, changed), freed=freed, freed_bytes=total, new_footprint=after
            )
        )
        if after.fits:
            return tried[-1]
    return max(
        tried,
        key=lambda effect: effect.freed_bytes,
        default=RemedyEffect(remedy, None, (), freed={}, freed_bytes=0, new_footprint=None, problem=problem),
    )


def changed_settings(before: RunSpec, after: RunSpec) -> tuple[str, ...]:
    """What differs between two runs, as `--set` takes it."""
    settings = []
    for table in ("training", "optimizer", "layout", "cluster"):
        old = getattr(before, table)
        new = getattr(after, table)
        for field in type(new).model_fields:
            if getattr(old, field) != getattr(new, field):
                value = getattr(new, field)
                settings.append(f"{table}.{field}={'' if value is None else value}")
    return tuple(settings)

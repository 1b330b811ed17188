"""The search: every layout's memory, then the time of those that are likely to fit, ranked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from phalanx.cost.estimate.job_table import PHALANX_CHECKPOINTING, Column
from phalanx.cost.estimate.memory import estimate_memory, memory_utilisation, oom_probability
from phalanx.cost.estimate.step_time import step_seconds
from phalanx.cost.exact.flops import mfu, recomputed_flops_per_token, training_flops_per_token
from phalanx.cost.exact.pipeline_split import check_layout
from phalanx.cost.exact.rank_memory import rank_memory
from phalanx.plan.search.candidates import CandidateLayout, candidate_jobs, enumerate_layouts, offload_variants
from phalanx.plan.search.oom_risk import (
    MAX_OOM_PROBABILITY,
    SAFE_OOM_PROBABILITY,
    device_and_host_bytes,
    layout_oom_probability,
    process_bytes,
)
from phalanx.plan.tables.job_columns import interval_half_width, memory_constants_for, time_constants_for
from phalanx.spec.errors import UserError
from phalanx.spec.run import RunSpec

MAX_EXACT_EVALUATIONS = 1000
"""Layouts that are counted at most: beyond so many that fit by the formula and not as counted, none is looked for."""
PARTS = ("compute", "exchange", "bubble", "send", "data_parallel", "update", "offload", "waiting")


@dataclass(frozen=True)
class EvaluatedLayout:
    """A layout with what it takes."""

    candidate: CandidateLayout
    step_seconds: float
    low_seconds: float
    high_seconds: float
    """Between `low` and `high` lie 80 of 100 steps."""
    parts: dict[str, float]
    """Seconds of the step by what they go to; `exchange` is part of `compute`."""
    memory_bytes: float
    """Held by the fullest rank; on a machine that was calibrated with what a process has beside tensors."""
    host_bytes: float
    """In CPU memory, for the rank that offloads most."""
    stages: dict[str, dict[str, float]]
    """Bytes by part of the first and the last stage."""
    p_oom: float
    tokens_per_second: float
    mfu: float
    """As the trainer's metrics have it: attention's causal half of the pairs counts. Tables of published rows count all
    pairs (`describe.flops_per_token`), as most publications do."""
    hfu: float
    """With what recomputation does once more."""

    @property
    def exposed(self) -> float:
        """Seconds of the step in which a rank only communicates."""
        return sum(self.parts[part] for part in ("exchange", "send", "data_parallel"))


@dataclass(frozen=True)
class Plan:
    """What a search found."""

    options: list[EvaluatedLayout]
    """Those that fit and can run, fastest first."""
    considered: int
    fitting: int
    closest_to_fitting: EvaluatedLayout | None
    """The one that is nearest to fitting, where none does."""

    @property
    def fastest_safe(self) -> EvaluatedLayout | None:
        """The fastest whose memory is almost surely enough, if any of `options` is."""
        return next((option for option in self.options if option.p_oom < SAFE_OOM_PROBABILITY), None)

    @property
    def chosen(self) -> EvaluatedLayout:
        """What is used where nobody chooses: the fastest of `options` that is almost surely enough, or the surest."""
        return self.fastest_safe or min(self.options, key=lambda option: option.p_oom)

    @property
    def pareto_front(self) -> list[EvaluatedLayout]:
        """Of `options`, those that no other beats in both time and memory."""
        found: list[EvaluatedLayout] = []
        for option in self.options:
            if not found or option.memory_bytes < found[-1].memory_bytes:
                found.append(option)
        return found


TIE_TOLERANCE = 0.001
"""Steps that differ by less are equally long: the simpler layout is preferred, then the smaller one."""


ProgressCallback = Callable[[str, int, int], None]
"""Told during a search what is being done, how much of it is, and of how much."""


def search_layouts(
    run: RunSpec,
    world_size: int,
    keep: int = 20,
    report: ProgressCallback = lambda *_: None,
    wanted: Callable[[CandidateLayout], bool] = lambda _: True,
) -> Plan:
    """The `keep` fastest layouts that are wanted and likely to fit.

    Memory of all is computed before the time of any: no bound on time is needed, and none is lost. Nothing is offloaded
    of what fits without: that never makes a step shorter.
    Raises UserError for a cluster whose speeds are not known, and where no layout divides the ranks.
    """
    found = enumerate_layouts(run, world_size)
    if not found:
        raise UserError(
            "cluster.nodes x cluster.nproc_per_node",
            world_size,
            "ranks share this model and this batch in no layout",
            "use a number of ranks whose factors divide the sequences of a step and the model",
        )
    report("evaluating layouts", 0, len(found))
    found, ordered = with_offload_variants(run, world_size, found)
    report("evaluating layouts", len(found), len(found))
    report("counting what the fastest hold", 0, keep)
    offered: list[EvaluatedLayout] = []
    offering = runnable_layouts(run, world_size, filter(wanted, ordered))  # with what offload makes of some
    for option in islice((option for option in offering if wanted(option.candidate)), keep):
        offered.append(option)
        report("counting what the fastest hold", len(offered), keep)
    least = None if offered else evaluate_smallest(run, world_size, found)
    return Plan(offered, len(found), len(ordered), least)


def with_offload_variants(
    run: RunSpec, world_size: int, found: list[CandidateLayout]
) -> tuple[list[CandidateLayout], list[CandidateLayout]]:
    """Layouts with what offload makes of those that are not likely to fit; and which of all these are, in order."""
    risk = oom_probabilities(run, world_size, found)
    more = [other for at in np.flatnonzero(risk >= MAX_OOM_PROBABILITY) for other in offload_variants(run, found[at])]
    fitting = [found[at] for at in np.flatnonzero(risk < MAX_OOM_PROBABILITY)]
    return [*found, *more], rank_fitting(run, world_size, [*fitting, *more])


def runnable_layouts(run: RunSpec, world_size: int, ordered: Iterable[CandidateLayout]) -> Iterator[EvaluatedLayout]:
    """Of layouts in order those that can run, and fit as they are counted: of the first `COUNTED`. What offload makes
    of those that fit by the formula only has its own place, which is later."""
    later: list[EvaluatedLayout] = []
    for candidate in islice(ordered, MAX_EXACT_EVALUATIONS):
        if not can_run(run, world_size, candidate):
            continue
        option = evaluate(run, world_size, [candidate])[0]
        while later and later[0].step_seconds < option.step_seconds:
            yield from _if_likely_to_fit(with_exact_memory(run, world_size, later.pop(0)))
        option = with_exact_memory(run, world_size, option)
        yield from _if_likely_to_fit(option)
        if option.p_oom >= MAX_OOM_PROBABILITY:
            later += evaluate(run, world_size, list(offload_variants(run, candidate)))
            later.sort(key=lambda other: other.step_seconds)
    for option in later:
        yield from _if_likely_to_fit(with_exact_memory(run, world_size, option))


def _if_likely_to_fit(option: EvaluatedLayout) -> Iterator[EvaluatedLayout]:
    if option.p_oom < MAX_OOM_PROBABILITY:
        yield option


def rank_fitting(run: RunSpec, world_size: int, found: list[CandidateLayout]) -> list[CandidateLayout]:
    """Of some layouts those that are likely to fit, in the order of preference; not all of them can run."""
    if not found:
        return []
    jobs, c = candidate_jobs(run, world_size, found), memory_constants_for(run.cluster)
    held = estimate_memory(c, jobs)
    memory = np.broadcast_to(held.allocated, len(found))
    risk = np.broadcast_to(oom_probability(c, jobs, held), len(found))
    fitting = np.flatnonzero(risk < MAX_OOM_PROBABILITY)
    if not len(fitting):
        return []
    seconds = np.broadcast_to(step_seconds(time_constants_for(run.cluster), jobs.select(fitting)).total, len(fitting))
    fastest = fitting[
        preference_order(seconds, np.array([found[at].num_parallel_axes for at in fitting]), memory[fitting])
    ]
    return [found[at] for at in fastest]


def oom_probabilities(run: RunSpec, world_size: int, found: list[CandidateLayout]) -> Column:
    """The probability that memory is not enough for each of some layouts."""
    jobs, c = candidate_jobs(run, world_size, found), memory_constants_for(run.cluster)
    return np.broadcast_to(oom_probability(c, jobs, estimate_memory(c, jobs)), len(found))


def smallest_layout(run: RunSpec, world_size: int, found: list[CandidateLayout]) -> CandidateLayout:
    """Of some layouts the one that most likely fits: that least fills the device's memory and the CPU's."""
    jobs, c = candidate_jobs(run, world_size, found), memory_constants_for(run.cluster)
    return found[int(np.argmin(np.broadcast_to(memory_utilisation(c, jobs, estimate_memory(c, jobs)), len(found))))]


def evaluate_smallest(run: RunSpec, world_size: int, found: list[CandidateLayout]) -> EvaluatedLayout:
    """What the smallest of some layouts takes, as it is counted if it can run."""
    option = evaluate(run, world_size, [smallest_layout(run, world_size, found)])[0]
    return with_exact_memory(run, world_size, option) if can_run(run, world_size, option.candidate) else option


def preference_order(seconds: Column, axes: NDArray[np.int64], memory: Column) -> NDArray[np.int64]:
    """The order of preference: by time, and where times are alike by simplicity, then by memory."""
    alike = np.floor(np.log(seconds) / TIE_TOLERANCE)
    return np.lexsort((memory, axes, alike))


def can_run(run: RunSpec, world_size: int, candidate: CandidateLayout) -> bool:
    """Whether Phalanx trains it."""
    try:
        check_layout(run.model_copy(update={"layout": candidate.layout()}), world_size)
    except UserError:
        return False
    return True


def with_exact_memory(run: RunSpec, world_size: int, option: EvaluatedLayout) -> EvaluatedLayout:
    """An option with what Phalanx itself would hold, counted tensor by tensor as `phalanx memory` does, which may be
    more than the formula has for any trainer."""
    own = run.model_copy(update={"layout": option.candidate.layout()})
    held, host = device_and_host_bytes(run.cluster, rank_memory(own, world_size).values())
    used = process_bytes(run.cluster, held) if run.cluster.calibration else held
    risk = max(option.p_oom, layout_oom_probability(run.cluster, held, host))
    return replace(option, memory_bytes=used, host_bytes=host, p_oom=risk)


def evaluate(run: RunSpec, world_size: int, found: list[CandidateLayout]) -> list[EvaluatedLayout]:
    """What each of some layouts takes, in their order."""
    if not found:
        return []
    jobs, size = candidate_jobs(run, world_size, found), len(found)
    c = memory_constants_for(run.cluster)
    time, held = step_seconds(time_constants_for(run.cluster), jobs), estimate_memory(c, jobs)
    risk = oom_probability(c, jobs, held)
    spread = np.exp(interval_half_width(run.cluster, jobs))
    tokens, sequence = run.training.tokens_per_step, run.training.seq_len
    flops, peak = training_flops_per_token(run.model, sequence), float(jobs.peak_flops[0])
    again = {
        name: recomputed_flops_per_token(run.model, sequence, kind) for name, kind in PHALANX_CHECKPOINTING.items()
    }

    def number(column: Column, at: int) -> float:
        return float(np.broadcast_to(column, size)[at])

    options = []
    for at, candidate in enumerate(found):
        seconds = number(time.total, at)
        stages = {
            name: {part: number(getattr(stage, part), at) for part in ("state", "activations", "logits", "buffers")}
            for name, stage in (("first", held.first), ("last", held.last))
        }
        speed = tokens / seconds
        options.append(
            EvaluatedLayout(
                candidate,
                seconds,
                seconds / number(spread, at),
                seconds * number(spread, at),
                {part: number(getattr(time, part), at) for part in PARTS},
                number(held.allocated, at),
                number(held.host, at),
                stages,
                number(risk, at),
                speed,
                mfu(speed, flops, peak, world_size),
                mfu(speed, flops + again[candidate.activation_checkpointing], peak, world_size),
            )
        )
    return options

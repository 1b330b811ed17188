"""The search: every layout's memory, then the time of those that are likely to fit, ranked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice

import numpy as np

from phalanx.cost.estimate.memory import estimate_memory, memory_utilisation, oom_probability
from phalanx.cost.estimate.step_time import step_seconds
from phalanx.plan.search.candidate_columns import candidate_jobs
from phalanx.plan.search.candidates import CandidateLayout, enumerate_layouts, offload_variants
from phalanx.plan.search.evaluate import can_run, evaluate, oom_probabilities, with_exact_memory
from phalanx.plan.search.oom_risk import (
    MAX_OOM_PROBABILITY,
)
from phalanx.plan.search.result import EvaluatedLayout, Plan, preference_order
from phalanx.plan.tables.job_columns import memory_constants_for, time_constants_for
from phalanx.spec.errors import UserError
from phalanx.spec.run import RunSpec

MAX_EXACT_EVALUATIONS = 1000
"""Layouts that are counted at most: beyond so many that fit by the formula and not as counted, none is looked for."""


ProgressCallback = Callable[[str, int, int], None]
"""Told during a search what is being done, how much of it is, and of how much."""


def search_layouts(
    run: RunSpec,
    world_size: int,
    keep: int = 20,
    report: ProgressCallback = lambda *_: None,
    is_wanted: Callable[[CandidateLayout], bool] = lambda _: True,
) -> Plan:
    """The `keep` fastest layouts that are wanted and likely to fit.

    Memory of all is computed before the time of any: no bound on time is needed, and none is lost. Nothing is offloaded
    of what fits without: that never makes a step shorter.
    Raises UserError for a cluster whose speeds are not known, and where no layout divides the ranks.
    """
    layouts = enumerate_layouts(run, world_size)
    if not layouts:
        raise UserError(
            "cluster.nodes x cluster.nproc_per_node",
            world_size,
            "ranks share this model and this batch in no layout",
            "use a number of ranks whose factors divide the sequences of a step and the model",
        )
    report("evaluating layouts", 0, len(layouts))
    layouts, ordered = with_offload_variants(run, world_size, layouts)
    report("evaluating layouts", len(layouts), len(layouts))
    report("counting what the fastest hold", 0, keep)
    offered: list[EvaluatedLayout] = []
    offering = runnable_layouts(run, world_size, filter(is_wanted, ordered))  # with what offload makes of some
    for option in islice((option for option in offering if is_wanted(option.candidate)), keep):
        offered.append(option)
        report("counting what the fastest hold", len(offered), keep)
    smallest = None if offered else evaluate_smallest(run, world_size, layouts)
    return Plan(offered, len(layouts), len(ordered), smallest)


def with_offload_variants(
    run: RunSpec, world_size: int, layouts: list[CandidateLayout]
) -> tuple[list[CandidateLayout], list[CandidateLayout]]:
    """Layouts with what offload makes of those that are not likely to fit; and which of all these are, in order."""
    risk = oom_probabilities(run, world_size, layouts)
    more = [
        other
        for index in np.flatnonzero(risk >= MAX_OOM_PROBABILITY)
        for other in offload_variants(run, layouts[index])
    ]
    fitting = [layouts[index] for index in np.flatnonzero(risk < MAX_OOM_PROBABILITY)]
    return [*layouts, *more], rank_fitting(run, world_size, [*fitting, *more])


def runnable_layouts(run: RunSpec, world_size: int, ordered: Iterable[CandidateLayout]) -> Iterator[EvaluatedLayout]:
    """Of layouts in order those that can run, and fit as they are counted: of the first `MAX_EXACT_EVALUATIONS`. What
    offload makes of those that fit by the formula only has its own place, which is later."""
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


def rank_fitting(run: RunSpec, world_size: int, layouts: list[CandidateLayout]) -> list[CandidateLayout]:
    """Of some layouts those that are likely to fit, in the order of preference; not all of them can run."""
    if not layouts:
        return []
    jobs, c = candidate_jobs(run, world_size, layouts), memory_constants_for(run.cluster)
    held = estimate_memory(c, jobs)
    memory = np.broadcast_to(held.allocated, len(layouts))
    risk = np.broadcast_to(oom_probability(c, jobs, held), len(layouts))
    fitting = np.flatnonzero(risk < MAX_OOM_PROBABILITY)
    if not len(fitting):
        return []
    seconds = np.broadcast_to(step_seconds(time_constants_for(run.cluster), jobs.select(fitting)).total, len(fitting))
    fastest = fitting[
        preference_order(seconds, np.array([layouts[index].num_parallel_axes for index in fitting]), memory[fitting])
    ]
    return [layouts[index] for index in fastest]


def smallest_layout(run: RunSpec, world_size: int, layouts: list[CandidateLayout]) -> CandidateLayout:
    """Of some layouts the one that most likely fits: that least fills the device's memory and the CPU's."""
    jobs, c = candidate_jobs(run, world_size, layouts), memory_constants_for(run.cluster)
    return layouts[int(np.argmin(np.broadcast_to(memory_utilisation(c, jobs, estimate_memory(c, jobs)), len(layouts))))]


def evaluate_smallest(run: RunSpec, world_size: int, layouts: list[CandidateLayout]) -> EvaluatedLayout:
    """What the smallest of some layouts takes, as it is counted if it can run."""
    option = evaluate(run, world_size, [smallest_layout(run, world_size, layouts)])[0]
    return with_exact_memory(run, world_size, option) if can_run(run, world_size, option.candidate) else option

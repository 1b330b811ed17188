"""Search: the memory of every layout, then the step time of those likely to fit, and their ranking."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice

import numpy as np

from phalanx.plan.search.candidates import CandidateLayout
from phalanx.plan.search.enumerate_layouts import enumerate_layouts, smaller_variants
from phalanx.plan.search.evaluate import can_run, evaluate, predict_layouts, with_exact_memory
from phalanx.plan.search.oom_risk import MAX_OOM_PROBABILITY, SAFE_OOM_PROBABILITY
from phalanx.plan.search.result import EvaluatedLayout, Plan, preference_order
from phalanx.spec.errors import UserError
from phalanx.spec.resolved_run import ResolvedRun

UNCERTAIN_GAIN = 0.05
"""Minimum relative gain in step time that justifies offload or more kinds of parallelism.

Half of an 80 % interval is 7 % or more. In published sweeps, the simplest layout within 5 % of the fastest predicted
one is not slower relative to the best run (hage: 2.7 % instead of 3.0), but the simplest within 7.5 % is (3.8 %).
"""
MAX_EXACT_EVALUATIONS = 1000
"""Maximum number of layouts whose memory is counted exactly; the search stops after that many."""


ProgressCallback = Callable[[str, int, int], None]
"""Callback for search progress: current task, completed count, total count."""


def search_layouts(
    resolved: ResolvedRun,
    keep: int = 20,
    report: ProgressCallback = lambda *_: None,
    is_wanted: Callable[[CandidateLayout], bool] = lambda _: True,
    prefer_simple: bool = False,
    group_schedules: bool = False,
) -> Plan:
    """Return the `keep` fastest layouts that are wanted and likely to fit.

    The memory of all layouts is computed before the time of any, so the search needs no bound on time and prunes
    nothing. Layouts that fit get no variants with recomputed norms or offload, which never make a step shorter. With
    `prefer_simple`, they are in order of preference (`TimeBands`). With `group_schedules`, none follows the first safe
    one of layouts that differ in their schedule only. Raises UserError if a speed of the cluster is unknown, or no
    layout divides the ranks.
    """
    layouts = enumerate_layouts(resolved)
    if not layouts:
        problem = "has no layout that divides this model and this batch"
        fix = "use a number of ranks whose factors divide the sequences of a step and the model"
        raise UserError("cluster.nodes x cluster.nproc_per_node", resolved.world_size, problem, fix)
    report("evaluating layouts", 0, len(layouts))
    layouts, ordered = with_smaller_variants(resolved, layouts)
    report("evaluating layouts", len(layouts), len(layouts))
    report("counting memory of the fastest", 0, keep)
    count_memory = MemoryCounts(resolved)

    def offer(
        candidates: Iterable[CandidateLayout], is_wanted: Callable[[CandidateLayout], bool]
    ) -> Iterator[EvaluatedLayout]:
        """Yield the wanted layouts that run and fit, in order, including smaller variants."""
        order = candidates.order if isinstance(candidates, TimeBands) else _step_seconds
        offering = runnable_layouts(resolved, filter(is_wanted, candidates), order, count_memory)
        return (evaluated for evaluated in offering if is_wanted(evaluated.candidate))

    fastest = next(offer(ordered, is_wanted), None)
    preferred: Iterable[CandidateLayout] = ordered if fastest is not None else []
    if prefer_simple and fastest is not None:
        preferred = TimeBands(resolved, ordered, fastest)
    shown: set[CandidateLayout] = set()
    offered: list[EvaluatedLayout] = []

    def is_new(candidate: CandidateLayout) -> bool:
        return _without_schedule(candidate) not in shown and is_wanted(candidate)

    for evaluated in islice(offer(preferred, is_new), keep):
        offered.append(evaluated)
        if group_schedules and evaluated.p_oom < SAFE_OOM_PROBABILITY:
            shown.add(_without_schedule(evaluated.candidate))
        report("counting memory of the fastest", len(offered), keep)
    smallest = None
    if not offered:
        smallest = evaluate(resolved, [smallest_layout(resolved, layouts)])[0]
        if can_run(resolved, smallest.candidate):
            smallest = with_exact_memory(resolved, smallest)
    return Plan(layouts=offered, candidates=layouts, fitting=len(ordered), fastest=fastest, closest_to_fitting=smallest)


class MemoryCounts:
    """Exact memory of a run's layouts, each counted once: the search looks at the first layouts twice."""

    def __init__(self, resolved: ResolvedRun) -> None:
        self.resolved = resolved
        self._counted: dict[CandidateLayout, EvaluatedLayout] = {}

    def __call__(self, evaluated: EvaluatedLayout) -> EvaluatedLayout:
        """Return the layout with exact memory."""
        if evaluated.candidate not in self._counted:
            self._counted[evaluated.candidate] = with_exact_memory(self.resolved, evaluated)
        return self._counted[evaluated.candidate]


class TimeBands:
    """Layouts in order of preference, sorted within bands of similar step time.

    Steps in a band differ by less than `UNCERTAIN_GAIN`; the first band starts at the fastest layout. Within a band,
    layouts without offload come first, then those with fewer kinds of parallelism.
    """

    def __init__(self, resolved: ResolvedRun, ordered: list[CandidateLayout], fastest: EvaluatedLayout) -> None:
        self.resolved = resolved
        self.ordered = ordered
        self.fastest = fastest
        self.ends: list[float] = []
        """Maximum step time of each band so far."""

    def __iter__(self) -> Iterator[CandidateLayout]:
        self.ends = []
        start = 0
        seconds = self.fastest.step_seconds
        while start < len(self.ordered):
            self.ends.append(seconds * (1 + UNCERTAIN_GAIN))
            stop = bisect_right(self.ordered, self.ends[-1], lo=start, key=self._seconds)
            yield from sorted(self.ordered[start:stop], key=lambda c: (c.offloads, c.num_parallel_axes))
            start = stop
            seconds = self._seconds(self.ordered[start]) if start < len(self.ordered) else 0.0

    def order(self, evaluated: EvaluatedLayout) -> list[float]:
        """Return the sort key of a layout, which begins with its band among those yielded so far."""
        candidate = evaluated.candidate
        band = bisect_left(self.ends, evaluated.step_seconds)
        return [band, candidate.offloads, candidate.num_parallel_axes, evaluated.step_seconds]

    def _seconds(self, candidate: CandidateLayout) -> float:
        return evaluate(self.resolved, [candidate])[0].step_seconds


def _step_seconds(evaluated: EvaluatedLayout) -> list[float]:
    return [evaluated.step_seconds]


def _without_schedule(candidate: CandidateLayout) -> CandidateLayout:
    return candidate._replace(schedule="1f1b", virtual_stages=1)


def with_smaller_variants(
    resolved: ResolvedRun, layouts: list[CandidateLayout]
) -> tuple[list[CandidateLayout], list[CandidateLayout]]:
    """Return all layouts plus smaller variants of those unlikely to fit, and the fitting ones in order."""
    risk = predict_layouts(resolved, layouts).p_oom
    unlikely = (layouts[index] for index in np.flatnonzero(risk >= MAX_OOM_PROBABILITY))
    smaller = [variant for candidate in unlikely for variant in smaller_variants(resolved.run, candidate)]
    fitting = [layouts[index] for index in np.flatnonzero(risk < MAX_OOM_PROBABILITY)]
    return [*layouts, *smaller], rank_fitting(resolved, [*fitting, *smaller])


def runnable_layouts(
    resolved: ResolvedRun,
    ordered: Iterable[CandidateLayout],
    order: Callable[[EvaluatedLayout], list[float]] = _step_seconds,
    count_memory: Callable[[EvaluatedLayout], EvaluatedLayout] | None = None,
) -> Iterator[EvaluatedLayout]:
    """Yield the layouts that run and fit in memory, in order.

    The exact memory count is used for the first `MAX_EXACT_EVALUATIONS`. If a layout fits by the estimate only, its
    smaller variants follow, at the later position that `order` gives them. `count_memory` returns a layout with exact
    memory, if some have been counted before.
    """
    count_memory = count_memory or partial(with_exact_memory, resolved)

    def generate() -> Iterator[EvaluatedLayout]:
        later: list[EvaluatedLayout] = []
        for candidate in islice(ordered, MAX_EXACT_EVALUATIONS):
            if not can_run(resolved, candidate):
                continue
            evaluated = evaluate(resolved, [candidate])[0]
            later.sort(key=order)
            while later and order(later[0]) < order(evaluated):
                yield count_memory(later.pop(0))
            evaluated = count_memory(evaluated)
            yield evaluated
            if evaluated.p_oom >= MAX_OOM_PROBABILITY:
                later += evaluate(resolved, list(smaller_variants(resolved.run, candidate)))
        yield from map(count_memory, sorted(later, key=order))

    return (evaluated for evaluated in generate() if evaluated.p_oom < MAX_OOM_PROBABILITY)


def rank_fitting(resolved: ResolvedRun, layouts: list[CandidateLayout]) -> list[CandidateLayout]:
    """Return the layouts that are likely to fit, in order of preference; some may not run."""
    if not layouts:
        return []
    predictions = predict_layouts(resolved, layouts)
    fitting = np.flatnonzero(predictions.p_oom < MAX_OOM_PROBABILITY)
    if not len(fitting):
        return []
    seconds = predictions.select(fitting).seconds
    axes = np.array([layouts[index].num_parallel_axes for index in fitting])
    order = preference_order(seconds, axes, predictions.memory_bytes[fitting])
    return [layouts[index] for index in fitting[order]]


def smallest_layout(resolved: ResolvedRun, layouts: list[CandidateLayout]) -> CandidateLayout:
    """Return the layout that fills the memory of device and CPU least, and so most likely fits."""
    return layouts[int(np.argmin(predict_layouts(resolved, layouts).memory_utilization))]

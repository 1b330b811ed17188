"""All layouts of a run with what the planner predicts of each, its first choices, and the Pareto front."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from phalanx.cost.kinds import Column
from phalanx.plan.search.candidates import CandidateLayout
from phalanx.plan.search.evaluate import LayoutPredictions, can_run, evaluate, predict_layouts, with_exact_memory
from phalanx.plan.search.explain import plan_or_raise
from phalanx.plan.search.oom_risk import MAX_OOM_PROBABILITY
from phalanx.plan.search.result import EvaluatedLayout, Plan, pareto_front
from phalanx.plan.search.search import MAX_EXACT_EVALUATIONS, ProgressCallback
from phalanx.spec.resolved_run import ResolvedRun


@dataclass(frozen=True, kw_only=True)
class Exploration:
    """A searched plan with predictions of every layout in it. Layouts are known by their index in `layouts`."""

    resolved: ResolvedRun
    plan: Plan
    layouts: list[CandidateLayout]
    predictions: LayoutPredictions
    ranked: dict[int, EvaluatedLayout]
    """The planner's first choices, in its order of preference."""
    counted: dict[int, EvaluatedLayout]
    """The layouts whose memory was counted: the first choices, and those that nothing beats by the formula."""

    @cached_property
    def front(self) -> dict[int, EvaluatedLayout]:
        """The Pareto front of the counted layouts, the fastest first."""
        index_of = {evaluated.candidate: index for index, evaluated in self.counted.items()}
        return {index_of[evaluated.candidate]: evaluated for evaluated in pareto_front(list(self.counted.values()))}

    def column(self, values: Column) -> Column:
        """Return a predicted column with a row for each layout."""
        return np.broadcast_to(values, len(self.layouts))


def explore(
    resolved: ResolvedRun, keep: int, group_schedules: bool = True, report: ProgressCallback = lambda *_: None
) -> Exploration:
    """Search for the first `keep` choices of the planner, and predict all layouts that the search considered.

    With `group_schedules`, one of the layouts that differ in their schedule only is kept, as in `plan_or_raise`.
    Raises UserError if no layout fits, as in `plan_or_raise`.
    """
    plan = plan_or_raise(resolved, keep, report, group_schedules)
    index_of = {candidate: index for index, candidate in enumerate(plan.candidates)}
    # Variants with offload that the search made while it counted memory are not among the candidates.
    for evaluated in plan.layouts:
        index_of.setdefault(evaluated.candidate, len(index_of))
    layouts = list(index_of)
    predictions = predict_layouts(resolved, layouts)
    ranked = {index_of[evaluated.candidate]: evaluated for evaluated in plan.layouts}
    counted = formula_front(resolved, layouts, predictions, report)
    return Exploration(
        resolved=resolved,
        plan=plan,
        layouts=layouts,
        predictions=predictions,
        ranked=ranked,
        counted={**counted, **ranked},
    )


def formula_front(
    resolved: ResolvedRun,
    layouts: list[CandidateLayout],
    predictions: LayoutPredictions,
    report: ProgressCallback = lambda *_: None,
) -> dict[int, EvaluatedLayout]:
    """Return the layouts that run and fit, and that no other such layout beats in step time and the formula's memory.

    Every layout has this estimate. Whether a layout fits is counted tensor by tensor too, for at most
    `MAX_EXACT_EVALUATIONS` layouts.

    The evaluations have exact memory; their keys are indices in `layouts`, the fastest first.
    """
    size = len(layouts)
    seconds, memory, p_oom = (
        np.broadcast_to(column, size)
        for column in (predictions.time.total, predictions.memory.allocated_bytes, predictions.p_oom)
    )
    fastest_first = np.lexsort((memory, seconds))
    front: dict[int, EvaluatedLayout] = {}
    smallest = np.inf
    counted = 0
    fitting = fastest_first[p_oom[fastest_first] < MAX_OOM_PROBABILITY]
    for done, index in enumerate(map(int, fitting)):
        if memory[index] >= smallest or not can_run(resolved, layouts[index]):
            continue
        if counted == MAX_EXACT_EVALUATIONS:
            break
        counted += 1
        report("finding the Pareto front", done, len(fitting))
        evaluated = with_exact_memory(resolved, evaluate(resolved, [layouts[index]])[0])
        if evaluated.p_oom < MAX_OOM_PROBABILITY:
            front[index] = evaluated
            smallest = memory[index]
    return front

"""Predictions of all layouts, the first choices, and the Pareto front."""

from __future__ import annotations

import numpy as np
import pytest

from phalanx.plan.search.evaluate import can_run, evaluate, with_exact_memory
from phalanx.plan.search.explain import plan_or_raise
from phalanx.plan.search.oom_risk import MAX_OOM_PROBABILITY
from phalanx.plan.search.result import pareto_front
from phalanx.report.explorer.exploration import explore, formula_front
from phalanx.spec.errors import UserError
from phalanx.spec.resolved_run import ResolvedRun
from tests.helpers.explorations import NUM_FIRST_CHOICES, small_exploration
from tests.helpers.planned_runs import make_run


def test_explore_ranks_layouts_as_plan_does():
    exploration = small_exploration()
    plan = plan_or_raise(exploration.resolved, NUM_FIRST_CHOICES)
    assert list(exploration.ranked.values()) == plan.layouts
    assert [exploration.layouts[index] for index in exploration.ranked] == [option.candidate for option in plan.layouts]
    assert exploration.layouts[: plan.searched] == plan.candidates


def test_explore_predicts_every_layout_as_evaluate_does():
    exploration = small_exploration()
    sample = range(0, len(exploration.layouts), 97)
    options = evaluate(exploration.resolved, [exploration.layouts[index] for index in sample])
    for index, option in zip(sample, options, strict=True):
        columns = (
            exploration.predictions.time.total,
            exploration.predictions.memory.allocated_bytes,
            exploration.predictions.p_oom,
        )
        predicted = [float(exploration.column(column)[index]) for column in columns]
        assert predicted == pytest.approx([option.step_seconds, option.memory_bytes, option.p_oom], rel=1e-12)


def test_front_has_the_counted_layouts_that_no_counted_layout_beats():
    exploration = small_exploration()
    assert {*exploration.ranked, *exploration.front} < {*exploration.counted}
    front = list(exploration.front.values())
    assert front == pareto_front(list(exploration.counted.values()))
    for option in exploration.counted.values():
        assert any(a.step_seconds <= option.step_seconds and a.memory_bytes <= option.memory_bytes for a in front)


def test_formula_front_has_exactly_the_layouts_that_nothing_beats():
    exploration = small_exploration()
    seconds = exploration.column(exploration.predictions.time.total)
    memory, p_oom = (
        exploration.column(exploration.predictions.memory.allocated_bytes),
        exploration.column(exploration.predictions.p_oom),
    )
    options = formula_front(exploration.resolved, exploration.layouts, predictions=exploration.predictions)
    front = list(options)
    assert len(front) > 3
    assert (np.diff(seconds[front]) >= 0).all()
    assert (np.diff(memory[front]) < 0).all()
    for index in np.flatnonzero(p_oom < MAX_OOM_PROBABILITY):
        beaten = (seconds[front] <= seconds[index]) & (memory[front] <= memory[index])
        if not beaten.any():
            candidate = exploration.layouts[index]
            assert not can_run(exploration.resolved, candidate) or (
                with_exact_memory(
                    exploration.resolved,
                    evaluate(exploration.resolved, [candidate])[0],
                ).p_oom
                >= MAX_OOM_PROBABILITY
            )
    for option in options.values():
        assert option.p_oom < MAX_OOM_PROBABILITY
        assert can_run(exploration.resolved, option.candidate)


def test_explore_raises_the_planners_error_when_nothing_fits():
    run = make_run("llama3-405b", sequences=8)
    with pytest.raises(UserError, match=r"layout cannot be chosen: none of [\d,]+ fits"):
        explore(ResolvedRun(run, run.cluster.ranks), 1)

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
from tests.helpers.explorations import NUM_FIRST_CHOICES, small_exploration
from tests.helpers.planned_runs import make_run


def test_explore_ranks_layouts_as_plan_does():
    found = small_exploration()
    plan = plan_or_raise(found.run, found.world_size, NUM_FIRST_CHOICES)
    assert list(found.ranked.values()) == plan.layouts
    assert [found.layouts[index] for index in found.ranked] == [option.candidate for option in plan.layouts]
    assert found.layouts[: plan.searched] == plan.candidates


def test_explore_predicts_every_layout_as_evaluate_does():
    found = small_exploration()
    sample = range(0, len(found.layouts), 97)
    options = evaluate(found.run, found.world_size, [found.layouts[index] for index in sample])
    for index, option in zip(sample, options, strict=True):
        columns = found.predictions.time.total, found.predictions.memory.allocated, found.predictions.p_oom
        predicted = [float(found.column(column)[index]) for column in columns]
        assert predicted == pytest.approx([option.step_seconds, option.memory_bytes, option.p_oom], rel=1e-12)


def test_front_has_the_counted_layouts_that_no_counted_layout_beats():
    found = small_exploration()
    assert {*found.ranked, *found.front} < {*found.counted}
    front = list(found.front.values())
    assert front == pareto_front(list(found.counted.values()))
    for option in found.counted.values():
        assert any(a.step_seconds <= option.step_seconds and a.memory_bytes <= option.memory_bytes for a in front)


def test_formula_front_has_exactly_the_layouts_that_nothing_beats():
    found = small_exploration()
    seconds = found.column(found.predictions.time.total)
    memory, p_oom = found.column(found.predictions.memory.allocated), found.column(found.predictions.p_oom)
    options = formula_front(found.run, found.world_size, found.layouts, predictions=found.predictions)
    front = list(options)
    assert len(front) > 3
    assert (np.diff(seconds[front]) >= 0).all()
    assert (np.diff(memory[front]) < 0).all()
    for index in np.flatnonzero(p_oom < MAX_OOM_PROBABILITY):
        beaten = (seconds[front] <= seconds[index]) & (memory[front] <= memory[index])
        if not beaten.any():
            candidate = found.layouts[index]
            assert not can_run(found.run, found.world_size, candidate) or (
                with_exact_memory(
                    found.run, found.world_size, evaluate(found.run, found.world_size, [candidate])[0]
                ).p_oom
                >= MAX_OOM_PROBABILITY
            )
    for option in options.values():
        assert option.p_oom < MAX_OOM_PROBABILITY
        assert can_run(found.run, found.world_size, option.candidate)


def test_explore_raises_the_planners_error_when_nothing_fits():
    run = make_run("llama3-405b", sequences=8)
    with pytest.raises(UserError, match=r"layout: no layout of [\d,]+ fits"):
        explore(run, run.cluster.ranks, 1)

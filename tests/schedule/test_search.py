"""Searched schedules are valid, within memory, never worse than the published ones, and better where those idle."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.schedule.published import one_f_one_b, zb_h1, zb_v
from phalanx.schedule.search import search_schedule, split_backward_passes
from phalanx.schedule.simulate import ActionTimes, peak_activations, simulate
from phalanx.schedule.validate import violations
from phalanx.spec.errors import UserError

WITH_HEAD = [0.5] * 7 + [0.9]
"""Times of eight stages, of which the last has the head."""


@pytest.mark.parametrize(
    "times",
    [
        ActionTimes(forward=0.5, input_grad=0.5, weight_grad=0.5, transfer=0.25),
        ActionTimes(forward=1.0, input_grad=1.5, weight_grad=0.5),
        ActionTimes(forward=1.5, input_grad=2.0, weight_grad=1.0, transfer=0.25),
        ActionTimes(forward=WITH_HEAD, input_grad=WITH_HEAD, weight_grad=WITH_HEAD, transfer=0.1),
    ],
    ids=["transfer", "long input halves", "both", "long last stage"],
)
def test_search_schedule_beats_zb_v_at_equal_memory(times: ActionTimes) -> None:
    p, m = 4, 8
    schedule = search_schedule(p, m, times, Fraction(p), moves=6_000)
    assert max(peak_activations(schedule, rank) for rank in range(p)) <= p
    assert simulate(schedule, times).bubble < simulate(zb_v(p, m), times).bubble


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 4), st.integers(1, 9), st.integers(1, 2), st.integers(0, 3), st.data())
def test_search_schedule_is_valid_and_not_slower_than_published(
    p: int, m: int, chunks: int, transfer: int, data: st.DataObject
) -> None:
    forward, input_grad, weight_grad = data.draw(st.tuples(*[st.integers(1, 5)] * 3))
    times = ActionTimes(forward=forward, input_grad=input_grad, weight_grad=weight_grad, transfer=transfer)
    limit = data.draw(st.integers(1, 2 * p))
    schedule = search_schedule(p, m, times, Fraction(limit), chunks, moves=200)
    assert violations(schedule) == []
    assert max(peak_activations(schedule, rank) for rank in range(p)) <= limit
    if limit >= p:
        published = [zb_v(p, m)] if chunks == 2 else [split_backward_passes(one_f_one_b(p, m)), zb_h1(p, m)]
        assert simulate(schedule, times).makespan <= min(simulate(candidate, times).makespan for candidate in published)


def test_search_schedule_respects_memory_limit_below_published() -> None:
    schedule = search_schedule(4, 8, ActionTimes(), Fraction(2), moves=1_000)
    assert max(peak_activations(schedule, rank) for rank in range(4)) <= 2
    with pytest.raises(UserError, match="less than one micro-batch"):
        search_schedule(4, 8, ActionTimes(), Fraction(1, 2))


def test_search_schedule_is_deterministic() -> None:
    times = ActionTimes(forward=1, input_grad=2, weight_grad=1, transfer=1)
    assert search_schedule(3, 6, times, Fraction(3), moves=500) == search_schedule(3, 6, times, Fraction(3), moves=500)


def test_split_backward_passes_lets_previous_stage_start_sooner() -> None:
    schedule = one_f_one_b(3, 5)
    assert [str(action) for action in split_backward_passes(schedule).actions(2)][:4] == ["2F0", "2I0", "2W0", "2F1"]
    assert (simulate(split_backward_passes(schedule)).makespan, simulate(schedule).makespan) == (19, 21)

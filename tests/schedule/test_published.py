"""Schedules, compared with their published makespans, bubbles, windows and peaks."""

from __future__ import annotations

from fractions import Fraction as Frac
from typing import get_args

import pytest

from phalanx.schedule.published import PUBLISHED, dualpipe_v, gpipe, interleaved, naive, one_f_one_b, zb_h1, zb_h2, zb_v
from phalanx.schedule.schedule import Schedule
from phalanx.schedule.simulate import ActionTimes, peak_activations, simulate
from phalanx.spec.errors import UserError
from phalanx.spec.layout import ScheduleName


def equal_times(time: Frac) -> ActionTimes:
    return ActionTimes(forward=time, input_grad=time, weight_grad=time)


ONE, HALF = equal_times(Frac(1)), equal_times(Frac(1, 2))
SIZES = [(4, 4), (4, 8), (4, 12), (8, 32), (2, 7), (3, 9), (5, 20)]
PASS_TIMES = [(1, 1, 1), (2, 2, 1), (3, 4, 2), (1, 2, 3), (5, 3, 1)]


def peak_activations_per_rank(schedule: Schedule) -> list[Frac]:
    return [peak_activations(schedule, rank) for rank in range(schedule.ranks)]


def bubble_size(schedule: Schedule, times: ActionTimes) -> Frac:
    """Return the longest window minus a rank's compute time: the size of the bubble in the zero bubble paper."""
    timeline = simulate(schedule, times)
    return max(Frac(timeline.rank_span(rank)) - Frac(timeline.busy(rank)) for rank in range(schedule.ranks))


def format_rank_order(schedule: Schedule, rank: int) -> str:
    return " ".join(f"{action.kind}{action.micro}" for action in schedule.actions(rank))


def test_each_schedule_name_of_a_run_file_has_a_rule() -> None:
    assert tuple(PUBLISHED) == get_args(ScheduleName)


@pytest.mark.parametrize("p", [4, 8])
def test_naive_schedule_bubble_is_one_minus_one_over_p(p: int) -> None:
    timeline = simulate(naive(p, 1), ActionTimes(forward=1, input_grad=Frac(1, 2), weight_grad=Frac(1, 2)))
    assert timeline.makespan == 2 * p
    assert timeline.bubble == 1 - Frac(1, p)


@pytest.mark.parametrize(("p", "m", "makespan"), [(4, 4, 14), (4, 12, 30), (4, 8, 22), (8, 32, 78)])
def test_gpipe_and_1f1b_differ_in_memory_only(p: int, m: int, makespan: int) -> None:
    half = Frac(1, 2)
    for schedule in (gpipe(p, m), one_f_one_b(p, m)):
        timeline = simulate(schedule, ActionTimes(forward=1, input_grad=half, weight_grad=half))
        assert timeline.makespan == makespan
        assert timeline.bubble == Frac(p - 1, m + p - 1)
        assert timeline.bubble_overhead == Frac(p - 1, m)
        assert simulate(schedule).makespan == 3 * (m + p - 1), "backward passes twice as long as forward ones"
    assert peak_activations_per_rank(gpipe(p, m)) == [m] * p
    assert peak_activations_per_rank(one_f_one_b(p, m)) == [min(m, p - s) for s in range(p)]


def test_gpipe_schedule_matches_published_diagram() -> None:
    assert format_rank_order(gpipe(4, 4), 0) == "F0 F1 F2 F3 B3 B2 B1 B0"
    timeline = simulate(gpipe(4, 4), ActionTimes(forward=1, input_grad=Frac(1, 2), weight_grad=Frac(1, 2)))
    assert [(spans[0].start, spans[-1].end) for spans in timeline.spans] == [(0, 14), (1, 13), (2, 12), (3, 11)]


@pytest.mark.parametrize(
    ("p", "m", "v", "bubble"),
    [
        (4, 4, 2, ".2727"),
        (4, 8, 2, ".1579"),
        (8, 16, 2, ".1795"),
        (8, 32, 2, ".0986"),
        (8, 64, 2, ".0519"),
        (4, 4, 4, ".1579"),
        (4, 8, 4, ".0857"),
        (8, 16, 4, ".0986"),
        (8, 32, 4, ".0519"),
        (8, 64, 4, ".0266"),
    ],
)
def test_interleaved_schedule_divides_bubble_by_chunk_count(p: int, m: int, v: int, bubble: str) -> None:
    schedule = interleaved(p, m, v)
    timeline = simulate(schedule, ONE)
    assert timeline.bubble == Frac(p - 1, v * m + p - 1)
    assert f"{float(timeline.bubble):.4f}".lstrip("0") == bubble
    assert peak_activations_per_rank(schedule)[0] == min(p + Frac(p - 1, v), m)


def test_interleaved_schedule_with_one_chunk_equals_1f1b() -> None:
    assert interleaved(4, 8, 1) == one_f_one_b(4, 8)
    with pytest.raises(UserError, match="micro-batches = 6"):
        interleaved(4, 6)


@pytest.mark.parametrize(("p", "m", "makespan"), [(4, 4, 15), (4, 8, 27), (4, 12, 39), (8, 32, 103)])
def test_zb_h1_makespan_bubble_and_memory_match_paper(p: int, m: int, makespan: int) -> None:
    timeline = simulate(zb_h1(p, m), ONE)
    assert timeline.makespan == makespan == 3 * m + p - 1
    assert timeline.bubble == Frac(p - 1, 3 * m + p - 1)
    assert peak_activations_per_rank(zb_h1(p, m)) == [p] * p


def test_zb_h1_schedule_matches_published_diagram() -> None:
    assert [format_rank_order(zb_h1(4, 4), rank) for rank in range(4)] == [
        "F0 F1 F2 F3 I0 W0 I1 W1 I2 W2 I3 W3",
        "F0 F1 F2 I0 F3 I1 W0 I2 W1 I3 W2 W3",
        "F0 F1 I0 F2 I1 F3 I2 W0 I3 W1 W2 W3",
        "F0 I0 F1 I1 F2 I2 F3 I3 W0 W1 W2 W3",
    ]


@pytest.mark.parametrize(("p", "m", "window"), [(4, 8, 24), (4, 12, 36), (8, 32, 96)])
def test_zb_h2_has_no_bubble_within_a_rank(p: int, m: int, window: int) -> None:
    timeline = simulate(zb_h2(p, m), ONE)
    assert [timeline.rank_span(rank) for rank in range(p)] == [window] * p
    assert timeline.rank_span_bubble == 0
    assert timeline.makespan == 3 * m + p - 1
    assert peak_activations_per_rank(zb_h2(p, m)) == [2 * p - 1] * p


@pytest.mark.parametrize(("p", "m"), [(4, 8), (8, 32), (2, 3), (3, 5)])
def test_zb_v_has_no_bubble_and_the_memory_of_1f1b(p: int, m: int) -> None:
    timeline = simulate(zb_v(p, m), HALF)  # two stages per rank
    assert [timeline.rank_span(rank) for rank in range(p)] == [3 * m] * p
    assert timeline.bubble == Frac(p - 1, 6 * m + p - 1)
    assert peak_activations_per_rank(zb_v(p, m)) == [p] * p


@pytest.mark.parametrize(("times", "bubble"), [((2, 2, 1), 1), ((3, 4, 2), 2)])
def test_zb_v_has_bubble_when_pass_times_differ(times: tuple[int, int, int], bubble: int) -> None:
    for p in (4, 8):
        forward, input_grad, weight_grad = (Frac(time, 2) for time in times)
        halves = ActionTimes(forward=forward, input_grad=input_grad, weight_grad=weight_grad)
        assert bubble_size(zb_v(p, 4 * p), halves) == bubble * (p - 1)


@pytest.mark.parametrize("times", PASS_TIMES)
@pytest.mark.parametrize(("p", "m"), [size for size in SIZES if size[1] >= 2 * size[0] - 1])
def test_schedule_bubble_sizes_match_zero_bubble_paper_formulas(p: int, m: int, times: tuple[int, int, int]) -> None:
    forward, input, weight = (Frac(time) for time in times)
    action_times, backward = ActionTimes(forward=forward, input_grad=input, weight_grad=weight), input + weight
    assert (
        bubble_size(gpipe(p, m), action_times)
        == bubble_size(one_f_one_b(p, m), action_times)
        == (p - 1) * (forward + backward)
    )
    if m % p == 0:
        for v in (2, 3):
            chunk = ActionTimes(forward=forward / v, input_grad=input / v, weight_grad=weight / v)
            assert bubble_size(interleaved(p, m, v), chunk) == (p - 1) * (forward + backward) / v
    if weight <= forward:  # longer weight halves delay the input halves instead of filling gaps between them
        assert bubble_size(zb_h1(p, m), action_times) == (p - 1) * (forward + input - weight)
        assert bubble_size(zb_h2(p, m), action_times) == max(Frac(0), (p - 1) * (forward + input - 2 * weight))


@pytest.mark.parametrize("times", [(1, 1, 1), (2, 2, 1), (3, 3, 2), (4, 4, 0)])
@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_dualpipe_v_makespan_and_memory_match_published_formulas(p: int, times: tuple[int, int, int]) -> None:
    """The repository's formula is (PP/2 - 1)(F&B + B - 3W). PP is the
    number of stages, with two per rank, and F = its I."""
    forward, input, weight = (Frac(time) for time in times)
    for m in (2 * p, 2 * p + 3, 5 * p):
        for overlapped in (forward + input + weight, (forward + input + weight) * Frac(4, 5)):
            timeline = simulate(
                dualpipe_v(p, m),
                ActionTimes(forward=forward, input_grad=input, weight_grad=weight, overlapped=overlapped),
            )
            ideal = m * (forward + input + weight) * 2
            if overlapped == forward + input + weight:
                assert timeline.makespan - ideal == (p - 1) * (overlapped + input + weight - 3 * weight)
        assert max(peak_activations_per_rank(dualpipe_v(p, m))) == Frac(2 * p + 1, 2)
    with pytest.raises(UserError, match="less than the"):
        dualpipe_v(p, 2 * p - 1)

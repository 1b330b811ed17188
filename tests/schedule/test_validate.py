"""Invalid schedules are rejected with their error, and valid ones satisfy the rules of every schedule."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.schedule.published import dualpipe_v, gpipe, interleaved, naive, one_f_one_b, zb_h1, zb_h2, zb_v
from phalanx.schedule.schedule import Action, Grid, Schedule, ScheduleStep, read_csv, to_csv
from phalanx.schedule.simulate import ActionTimes, in_flight_by_step, peak_activations, simulate
from phalanx.schedule.validate import lockstep_violations, violations
from phalanx.spec.errors import UserError

# Drawings of an article with an error: the backward pass of micro-batch 0 runs in the same tick on every rank.
WRONG_1F1B = """
F0 F1 F2 F3 B0 B1 B2 B3
- F0 F1 F2 B0 F3 B1 B2 B3
- - F0 F1 B0 F2 B1 F3 B2 B3
- - - F0 B0 F1 B1 F2 B2 F3 B3
"""
WRONG_ZERO_BUBBLE = """
F0 F1 F2 F3 I0 I1 I2 I3 W0 W1 W2 W3
- F0 F1 F2 I0 F3 I1 I2 W0 I3 W1 W2 W3
- - F0 F1 I0 F2 I1 F3 W0 I2 W1 I3 W2 W3
- - - F0 I0 F1 I1 F2 W0 I2 W1 F3 I3 W2 W3
"""
GPIPE = """
F0 F1 F2 F3 - - - - - - B3 B2 B1 B0
- F0 F1 F2 F3 - - - - B3 B2 B1 B0
- - F0 F1 F2 F3 - - B3 B2 B1 B0
- - - F0 F1 F2 F3 B3 B2 B1 B0
"""
NAIVE = """
F0 - - - - - - B0
- F0 - - - - B0
- - F0 - - B0
- - - F0 B0
"""


def parse_drawing(picture: str) -> list[list[ScheduleStep | None]]:
    """Return the rows of a picture as a file contains them, with one stage per rank."""
    rows = [row.split() for row in picture.strip().splitlines()]
    cells = [["" if cell == "-" else f"{rank}{cell}" for cell in row] for rank, row in enumerate(rows)]
    return read_csv("\n".join(",".join(row) for row in cells))


def schedule_to_grid(schedule: Schedule, times: ActionTimes) -> Grid:
    """Draw a schedule on a grid of ticks."""
    grid: list[list[ScheduleStep | None]] = []
    for spans in simulate(schedule, times).spans:
        row: list[ScheduleStep | None] = [None] * int(spans[-1].end)
        for step, start, _ in spans:
            row[int(start)] = step
        grid.append(row)
    return grid


@pytest.mark.parametrize("picture", [WRONG_1F1B, WRONG_ZERO_BUBBLE])
def test_lockstep_violations_finds_broken_dependencies_in_drawings(picture: str) -> None:
    messages = lockstep_violations(parse_drawing(picture))
    assert len(messages) == 12
    assert {(violation.rank, violation.action.kind) for violation in messages} <= {
        (r, k) for r in range(3) for k in "BI"
    }
    assert not violations(Schedule.from_rows(parse_drawing(picture))), (
        "as orders, with ranks waiting for each other, they can run"
    )


@pytest.mark.parametrize("picture", [GPIPE, NAIVE])
def test_lockstep_violations_is_empty_for_valid_drawings(picture: str) -> None:
    assert lockstep_violations(parse_drawing(picture)) == []


def test_validate_names_each_kind_of_violation() -> None:
    def problems(*rows: str) -> list[str]:
        return [str(violation) for violation in violations(Schedule.from_rows(read_csv("\n".join(rows))))]

    assert problems("0F0,0B0", "1F0,1B0") == []
    assert problems("0F0,0B0", "1B0,1F0") == [
        "rank 0: 0B0 (number 2 in its row) waits forever for 1B0",
        "rank 1: 1B0 (number 1 in its row) waits forever for 1F0",
    ]
    assert problems("0F0,0F1,0B0,0B1", "1F0,1B0") == ["rank 1: 1F1 is missing", "rank 1: 1B1 is missing"]
    assert problems("0F0,0F0,0B0") == ["rank 0: 0F0 runs 2 times"]
    assert problems("0F0,0I0") == ["rank 0: 0W0 is missing"]
    assert problems("0F0,0B0,0I0,0W0") == ["rank 0: 0B0 runs in addition to its I and W halves"]
    assert problems("0F0,0B0", "0F1,0B1") == ["rank 1: 0F1 belongs to a stage of rank 0"]
    assert problems("0F0,0W0,0I0") == ["rank 0: 0W0 (number 2 in its row) waits forever for 0I0"]
    with pytest.raises(UserError, match="schedule has 1 violations: rank 0: 0W0 is missing"):
        simulate(Schedule.from_rows(read_csv("0F0,0I0")))


def test_validate_reports_deadlocked_schedule() -> None:
    messages = violations(Schedule.from_rows(read_csv("0F0,0B0,0F1,0B1\n1F1,1F0,1B0,1B1")))
    assert [str(violation) for violation in messages] == [
        "rank 0: 0B0 (number 2 in its row) waits forever for 1B0",
        "rank 1: 1F1 (number 1 in its row) waits forever for 0F1",
    ]
    stuck, _ = violations(Schedule.from_rows(read_csv("0F0,0I0,0W0\n1I0,1F0,1W0")))
    assert str(stuck).endswith("waits forever for 1I0")


def test_read_csv_rejects_cells_that_are_not_actions() -> None:
    with pytest.raises(UserError, match="schedule, rank 1 = '1X0'"):
        read_csv("0F0\n1X0")
    with pytest.raises(UserError, match="contains no actions"):
        read_csv("\n,,\n")


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    p, m = draw(st.integers(1, 5)), draw(st.integers(1, 12))
    simple = [naive, gpipe, one_f_one_b, zb_h1, zb_h2, zb_v]
    make = draw(st.sampled_from([*simple, interleaved, dualpipe_v]))
    if make is interleaved:
        return interleaved(p, p * draw(st.integers(1, 3)), draw(st.integers(1, 3)))
    if make is dualpipe_v:
        return dualpipe_v(p, 2 * p + draw(st.integers(0, 5)))
    return make(p, m)


@given(schedules(), st.integers(0, 3), st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_published_schedules_satisfy_dependencies_when_simulated(
    schedule: Schedule, transfer: int, f: int, i: int, w: int
) -> None:
    assert violations(schedule) == []
    timeline = simulate(schedule, ActionTimes(forward=f, input_grad=i, weight_grad=w, transfer=transfer))
    ends: dict[Action, float] = {}
    for spans in timeline.spans:
        assert all(before.end <= after.start for before, after in itertools.pairwise(spans))
        for step, _, end in spans:
            ends |= dict.fromkeys([step] if isinstance(step, Action) else step, end)
    for rank, spans in enumerate(timeline.spans):
        for step, start, _ in spans:
            for action in [step] if isinstance(step, Action) else step:
                for alternatives in schedule.dependencies(action):
                    present = next(alternative for alternative in alternatives if alternative in ends)
                    assert ends[present] + transfer * (schedule.rank_of[present.stage] != rank) <= start
    assert all(timeline.busy(rank) <= timeline.rank_span(rank) <= timeline.makespan for rank in range(schedule.ranks))


@given(schedules())
def test_peak_activations_is_positive_and_at_most_micro_batch_count(schedule: Schedule) -> None:
    for rank in range(schedule.ranks):
        assert 0 < peak_activations(schedule, rank) <= schedule.micro_batches
        assert in_flight_by_step(schedule, rank)[-1] == 1, "the last action gives back the last activation"


@given(schedules())
def test_schedule_round_trips_through_csv(schedule: Schedule) -> None:
    assert Schedule.from_rows(read_csv(to_csv(schedule))) == schedule


@given(schedules(), st.data())
def test_validate_reports_removed_action(schedule: Schedule, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, schedule.ranks - 1))
    removed = data.draw(st.integers(0, len(schedule.orders[rank]) - 1))
    orders = [list(order) for order in schedule.orders]
    del orders[rank][removed]
    if any(orders):
        assert violations(Schedule.from_rows(orders))


@pytest.mark.parametrize("make", [naive, gpipe, one_f_one_b, zb_h1, zb_h2, zb_v])
def test_lockstep_violations_accepts_simulated_published_schedules(make: Callable[[int, int], Schedule]) -> None:
    halves = any(action.kind == "W" for action in make(4, 8).actions(0))
    ticks = ActionTimes() if halves else ActionTimes(forward=1, input_grad=Fraction(1, 2), weight_grad=Fraction(1, 2))
    assert lockstep_violations(schedule_to_grid(make(4, 8), ticks)) == []

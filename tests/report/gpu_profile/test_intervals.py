"""Sets of intervals, compared with sets of points."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from phalanx.report.gpu_profile.intervals import Interval, merge_intervals, subtract_intervals, total_length

INTERVALS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=12)
"""Some intervals are empty: the end is not after the start."""


def points(intervals: list[Interval]) -> set[int]:
    """Return the covered unit intervals by their starts."""
    return {point for start, end in intervals for point in range(int(start), int(end))}


@given(INTERVALS)
def test_merge_intervals_is_union_of_disjoint_intervals(intervals: list[Interval]) -> None:
    merged = merge_intervals(intervals)
    assert points(merged) == points(intervals)
    assert total_length(merged) == len(points(intervals))
    assert all(start < end for start, end in merged)
    assert all(end < start for (_, end), (start, _) in pairwise(merged))
    assert merge_intervals(merged) == merged


@given(INTERVALS, INTERVALS)
def test_subtract_intervals_removes_points_of_second_set(left: list[Interval], right: list[Interval]) -> None:
    difference = subtract_intervals(merge_intervals(left), merge_intervals(right))
    assert points(difference) == points(left) - points(right)
    assert merge_intervals(difference) == difference


def test_subtract_intervals_cuts_one_interval_several_times() -> None:
    assert subtract_intervals([(0, 10)], [(1, 2), (4, 5), (9, 12)]) == [(0, 1), (2, 4), (5, 9)]
    assert total_length([]) == 0

"""Arithmetic of sets of intervals, each with a start and an end.

A merged set is sorted, and its intervals are disjoint, do not touch and are not empty.
"""

from __future__ import annotations

from collections.abc import Iterable

Interval = tuple[float, float]


def merge_intervals(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of intervals as a merged set."""
    merged: list[Interval] = []
    for start, end in sorted(interval for interval in intervals if interval[0] < interval[1]):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


def subtract_intervals(intervals: Iterable[Interval], removed: Iterable[Interval]) -> list[Interval]:
    """Return the part of a merged set that is not in another merged set."""
    remaining: list[Interval] = []
    holes = list(removed)
    first_hole = 0
    for start, end in intervals:
        while first_hole < len(holes) and holes[first_hole][1] <= start:
            first_hole += 1
        index = first_hole
        while index < len(holes) and holes[index][0] < end:
            remaining.append((start, holes[index][0]))
            start = holes[index][1]
            index += 1
        remaining.append((start, end))
    return merge_intervals(remaining)


def total_length(intervals: Iterable[Interval]) -> float:
    """Return the sum of the lengths of intervals; for a merged set, the length of the set."""
    return sum(end - start for start, end in intervals)

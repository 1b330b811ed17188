"""A published timeline that no real schedule has, for the sake of those who read it."""

from __future__ import annotations

from phalanx.schedule.schedule import Action, OverlappedPair, ScheduleStep
from phalanx.schedule.simulate import Span, Timeline


def book_overlap(p: int, m: int) -> Timeline:
    """Ticks in lock-step in which a stage may do a forward and a backward pass at once, as if the second cost nothing;
    the last stage does both of the same micro-batch. With p = m = 4 the share of active stages is 25, 50, 75, 100, 75,
    75, 100, 75, 50, 25 %, as a book on networks for AI has it. On stage s (from 0) micro-batch i runs forward in tick
    s + i and backward in tick 2p - 2 - s + i. 1F1B is what comes nearest to it (`one_f_one_b`)."""

    def at(s: int, tick: int) -> ScheduleStep | None:
        forward, backward = tick - s, tick - (2 * p - 2 - s)
        before = Action(s, "F", forward) if 0 <= forward < m else None
        after = Action(s, "B", backward) if 0 <= backward < m else None
        return OverlappedPair(before, after) if before and after else before or after

    ticks = range(2 * p + m - 2)
    return Timeline(
        tuple(tuple(Span(step, t, t + 1) for t in ticks if (step := at(s, t)) is not None) for s in range(p))
    )


def active_fraction_per_tick(timeline: Timeline) -> list[float]:
    """The share of ranks that do something in each tick."""
    ticks = range(int(timeline.makespan))
    ranks = timeline.spans
    return [sum(any(start <= t < end for _, start, end in spans) for spans in ranks) / len(ranks) for t in ticks]

"""Simulation of a schedule: every rank runs its order as soon as its inputs have arrived."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from phalanx.schedule.schedule import Action, OverlappedPair, Schedule, ScheduleStep, actions, dependencies
from phalanx.schedule.validate import check_schedule

Time = float | Fraction


@dataclass(frozen=True, kw_only=True)
class ActionTimes:
    """Durations, in any one unit: one per stage, or one for all stages."""

    forward: Time | Sequence[Time] = 1
    input_grad: Time | Sequence[Time] = 1
    """The half of the backward pass for the gradient of a stage's input."""
    weight_grad: Time | Sequence[Time] = 1
    """The half of the backward pass for the gradients of its weights."""
    transfer: Time = 0
    """From the end of an action to the arrival of its output at another rank, which computes meanwhile."""
    overlapped: Time | None = None
    """An overlapped forward and backward pass; by default their sum."""

    def action_time(self, action: Action) -> Time:
        """Return the duration of an action."""
        forward, input_grad, weight_grad = (
            times[action.stage] if isinstance(times, Sequence) else times
            for times in (self.forward, self.input_grad, self.weight_grad)
        )
        return {"F": forward, "I": input_grad, "W": weight_grad, "B": input_grad + weight_grad}[action.kind]

    def step_time(self, step: ScheduleStep) -> Time:
        """Return the duration of a step."""
        if isinstance(step, OverlappedPair) and self.overlapped is not None:
            return self.overlapped
        return sum(self.action_time(action) for action in actions(step))


class Span(NamedTuple):
    """Start and end of a step."""

    step: ScheduleStep
    start: Time
    end: Time


@dataclass(frozen=True)
class Timeline:
    """The spans of all ranks, and metrics of them."""

    spans: tuple[tuple[Span, ...], ...]
    """Spans by rank, in order."""

    @property
    def makespan(self) -> Time:
        """The time from the first start to the last end on any rank."""
        return max(spans[-1].end for spans in self.spans) - min(spans[0].start for spans in self.spans)

    def rank_span(self, rank: int) -> Time:
        """Return the time from a rank's first start to its last end.

        It is the relevant time where steps follow each other without a synchronization of all ranks (arXiv 2401.10241,
        section 2)."""
        return self.spans[rank][-1].end - self.spans[rank][0].start

    def busy(self, rank: int) -> Time:
        """Return the time in which a rank computes."""
        return sum(span.end - span.start for span in self.spans[rank])

    @property
    def bubble(self) -> Time:
        """The idle share of the makespan over all ranks.

        For 1F1B it is (p - 1) / (m + p - 1) (arXiv 2104.04473, section 2.2)."""
        ranks = range(len(self.spans))
        return 1 - sum(self.busy(rank) for rank in ranks) / (len(ranks) * self.makespan)

    @property
    def bubble_overhead(self) -> Time:
        """The makespan minus the busiest rank's computing time, relative to the latter.

        For 1F1B it is (p - 1) / m (the other definition of the same source)."""
        busy = max(self.busy(rank) for rank in range(len(self.spans)))
        return self.makespan / busy - 1

    @property
    def rank_span_bubble(self) -> Time:
        """The idle share of the rank with the longest span."""
        rank = max(range(len(self.spans)), key=self.rank_span)
        return 1 - self.busy(rank) / self.rank_span(rank)


def simulate(schedule: Schedule, times: ActionTimes | None = None) -> Timeline:
    """Return the timeline of a valid schedule.

    Raises UserError if the schedule is not valid.
    """
    check_schedule(schedule)
    times = times or ActionTimes()
    end_times: dict[Action, Time] = {}
    spans: list[list[Span]] = [[] for _ in schedule.orders]
    remaining = [list(order)[::-1] for order in schedule.orders]
    while any(remaining):
        for rank, steps in enumerate(remaining):
            while steps:
                ready_times = [ready_time(action, schedule.rank_of, end_times, times) for action in actions(steps[-1])]
                known_times = [time for time in ready_times if time is not None]
                if len(known_times) < len(ready_times):
                    break
                step = steps.pop()
                start = max(*known_times, spans[rank][-1].end if spans[rank] else 0)
                spans[rank].append(Span(step, start, start + times.step_time(step)))
                end_times.update(dict.fromkeys(actions(step), spans[rank][-1].end))
    return Timeline(tuple(map(tuple, spans)))


def ready_time(
    action: Action, rank_of: Mapping[int, int], end_times: Mapping[Action, Time], times: ActionTimes
) -> Time | None:
    """Return the time at which all inputs of an action are on its rank; None while one is not finished.

    `rank_of` has the rank of each stage, and `end_times` the end of each finished action.
    """
    latest: Time = 0
    for alternatives in dependencies(action, len(rank_of)):
        dependency = next((alternative for alternative in alternatives if alternative in end_times), None)
        if dependency is None:
            return None
        is_same_rank = rank_of[dependency.stage] == rank_of[action.stage]
        latest = max(latest, end_times[dependency] + (0 if is_same_rank else times.transfer))
    return latest


def in_flight_by_step(schedule: Schedule, rank: int) -> list[int]:
    """Return the number of micro-batches with saved activations after each step of a rank.

    A micro-batch counts from the forward pass to the end of the backward pass (of its weight half, if split). It counts
    once per stage."""
    num_in_flight = 0
    counts = []
    for step in schedule.orders[rank]:
        num_in_flight += sum(action.kind == "F" for action in actions(step))
        # This is before the step's backward pass frees its activations.
        counts.append(num_in_flight)
        num_in_flight -= sum(action.kind in "BW" for action in actions(step))
    return counts


def peak_activations(schedule: Schedule, rank: int) -> Fraction:
    """Return the maximum of `in_flight_by_step`, in micro-batches of all of the rank's stages.

    A rank of 1F1B with 4 micro-batches has 4; a rank with 4 micro-batches of one of its two stages has 2."""
    return Fraction(max(in_flight_by_step(schedule, rank), default=0), len(schedule.stages_of(rank)))

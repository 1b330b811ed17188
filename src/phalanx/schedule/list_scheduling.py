"""List scheduling: an idle rank runs the best of its ready actions."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence

from phalanx.schedule.schedule import Action, ActionKind, Schedule
from phalanx.schedule.simulate import ActionTimes, Time, ready_time

PriorityFunction = Callable[[Action, int], tuple[float, ...]]
"""Sort key of a rank's ready actions, the best first; the second argument is its count in flight."""


def list_schedule(
    stages_of: Mapping[int, Sequence[int]],
    m: int,
    priority: PriorityFunction,
    limits: Sequence[int],
    times: ActionTimes,
) -> Schedule:
    """Return a schedule of split backward passes in which no rank idles while it has a ready action.

    `stages_of` has the stages of each rank, and `priority` the sort key of ready actions. `limits` is the maximum
    number of micro-batches in flight on each rank, from the forward pass to the weight half, counted once per stage.
    Each is at least the rank's number of stages.
    """
    rank_of = {stage: rank for rank, stages in stages_of.items() for stage in stages}
    next_micro: dict[tuple[int, ActionKind], int] = {}
    end_times: dict[Action, Time] = {}
    num_in_flight = dict.fromkeys(stages_of, 0)
    rank_free_times: dict[int, Time] = dict.fromkeys(stages_of, 0)
    orders: dict[int, list[Action]] = {rank: [] for rank in sorted(stages_of)}

    def is_ready(action: Action, now: Time) -> bool:
        ready_at = ready_time(action, rank_of, end_times, times)
        return ready_at is not None and ready_at <= now

    def has_room(stage: int, rank: int) -> bool:
        # A slot is reserved for each later stage of the rank, so that a started micro-batch can always finish.
        return num_in_flight[rank] + sum(later_stage > stage for later_stage in stages_of[rank]) < limits[rank]

    def candidate_actions(rank: int, now: Time) -> list[Action]:
        candidates = (
            Action(stage, kind, next_micro.get((stage, kind), 0))
            for stage in stages_of[rank]
            for kind in ("F", "I", "W")
            if kind != "F" or has_room(stage, rank)
        )
        return [action for action in candidates if action.micro < m and is_ready(action, now)]

    event_times: list[Time] = [0]
    while event_times:
        now = heapq.heappop(event_times)
        for rank, order in orders.items():
            if rank_free_times[rank] > now or not (choices := candidate_actions(rank, now)):
                continue
            action = min(choices, key=lambda choice: priority(choice, num_in_flight[rank]))
            order.append(action)
            next_micro[action.stage, action.kind] = action.micro + 1
            num_in_flight[rank] += {"F": 1, "I": 0, "W": -1, "B": -1}[action.kind]
            rank_free_times[rank] = end_times[action] = now + times.action_time(action)
            for event_time in {rank_free_times[rank], rank_free_times[rank] + times.transfer}:
                if event_time not in event_times:
                    heapq.heappush(event_times, event_time)
    return Schedule.from_rows(orders.values())

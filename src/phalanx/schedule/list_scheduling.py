"""List scheduling: a rank that is free takes the best of what it can do."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence

from phalanx.schedule.schedule import Action, ActionKind, Schedule
from phalanx.schedule.simulate import ActionTimes, Time, ready_time

PriorityFunction = Callable[[Action, int], tuple[float, ...]]
"""What sorts the actions that a rank can do, the best first, by how many micro-batches of its stages it holds."""


def list_schedule(
    stages_of: Mapping[int, Sequence[int]],
    m: int,
    preference: PriorityFunction,
    limits: Sequence[int],
    times: ActionTimes,
) -> Schedule:
    """A schedule of split backward passes in which no rank idles while it can do anything.

    `stages_of` are each rank's stages, `limits` how many micro-batches, those of each stage counted, it may hold from
    the forward pass to the weight half: at least its number of stages.
    """
    rank_of = {stage: rank for rank, stages in stages_of.items() for stage in stages}
    next_micro: dict[tuple[int, ActionKind], int] = {}
    ends: dict[Action, Time] = {}
    held = dict.fromkeys(stages_of, 0)
    free: dict[int, Time] = dict.fromkeys(stages_of, 0)
    orders: dict[int, list[Action]] = {rank: [] for rank in sorted(stages_of)}

    def arrived(action: Action, now: Time) -> bool:
        at = ready_time(action, rank_of, ends, times)
        return at is not None and at <= now

    def room(stage: int, rank: int) -> bool:
        # A place is kept for each later stage of the rank: what was begun can always be ended.
        return held[rank] + sum(later > stage for later in stages_of[rank]) < limits[rank]

    def possible(rank: int, now: Time) -> list[Action]:
        found = (
            Action(stage, kind, next_micro.get((stage, kind), 0))
            for stage in stages_of[rank]
            for kind in ("F", "I", "W")
            if kind != "F" or room(stage, rank)
        )
        return [action for action in found if action.micro < m and arrived(action, now)]

    moments: list[Time] = [0]
    while moments:
        now = heapq.heappop(moments)
        for rank, order in orders.items():
            if free[rank] > now or not (choices := possible(rank, now)):
                continue
            action = min(choices, key=lambda choice: preference(choice, held[rank]))
            order.append(action)
            next_micro[action.stage, action.kind] = action.micro + 1
            held[rank] += {"F": 1, "I": 0, "W": -1, "B": -1}[action.kind]
            free[rank] = ends[action] = now + times.of_action(action)
            for moment in {free[rank], free[rank] + times.transfer}:
                if moment not in moments:
                    heapq.heappush(moments, moment)
    return Schedule.from_rows(orders.values())

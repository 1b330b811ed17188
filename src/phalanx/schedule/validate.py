"""Whether a schedule can be right: every computation once, each after what it needs, and no rank waiting for ever."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from phalanx.schedule.schedule import Action, Grid, Schedule, actions
from phalanx.spec.errors import UserError


@dataclass(frozen=True)
class Violation:
    """What is wrong about one action."""

    rank: int
    action: Action
    problem: str

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.action} {self.problem}"


def check_schedule(schedule: Schedule) -> None:
    """Raise UserError with the first violations of a schedule, if it has any."""
    if found := violations(schedule):
        shown = "; ".join(map(str, found[:3])) + ("; ..." if len(found) > 3 else "")
        fix = "see them all: phalanx pipeline check FILE.csv"
        raise UserError("schedule", None, f"{len(found)} violations: {shown}", fix)


def violations(schedule: Schedule) -> list[Violation]:
    """What keeps ranks from running their orders, each at its own pace: none if the schedule is valid."""
    return [*_misplaced(schedule), *_counts(schedule)] or list(_stuck(schedule))


def lockstep_violations(grid: Grid) -> list[Violation]:
    """What is wrong about a picture in which every action takes one tick: also an action that does not come later than
    what it needs."""
    schedule = Schedule.from_rows(grid)
    ticks: dict[Action, int] = {}
    for row in grid:
        for tick, step in enumerate(row):
            for action in actions(step) if step else ():
                ticks.setdefault(action, tick)
    found = [*_misplaced(schedule), *_counts(schedule)]
    for rank in range(schedule.ranks):
        for action in schedule.actions(rank):
            for needed in schedule.dependencies(action):
                there = [one for one in needed if one in ticks]
                if there and min(ticks[one] for one in there) >= ticks[action]:
                    at = f"in tick {ticks[action]}, before {there[0]} is done, in tick {ticks[there[0]]}"
                    found.append(Violation(rank, action, f"runs {at}"))
    return found


def _misplaced(schedule: Schedule) -> Iterator[Violation]:
    """Stages that more than one rank has."""
    for rank in range(schedule.ranks):
        strange = {a.stage: a for a in reversed(list(schedule.actions(rank))) if schedule.rank_of[a.stage] != rank}
        for stage, action in sorted(strange.items()):
            yield Violation(rank, action, f"is of a stage that rank {schedule.rank_of[stage]} has")


def _counts(schedule: Schedule) -> Iterator[Violation]:
    """Actions that are missing or done more than once: a forward pass, and a whole backward pass or its two halves."""
    counted = Counter(action for rank in range(schedule.ranks) for action in schedule.actions(rank))
    for stage in range(schedule.stages):
        rank = schedule.rank_of.get(stage, 0)
        for micro in range(schedule.micro_batches):
            times = {kind: counted[Action(stage, kind, micro)] for kind in ("F", "B", "I", "W")}
            halved = bool(times["I"] or times["W"])
            expected = {"F": 1, "B": int(not halved), "I": int(halved), "W": int(halved)}
            for kind, wanted in expected.items():
                if times[kind] != wanted:
                    action, given = Action(stage, kind, micro), times[kind]  # type: ignore[arg-type]
                    again = "is done beside its halves" if given and not wanted else f"is done {given} times"
                    yield Violation(rank, action, "is missing" if not given else again)


def _stuck(schedule: Schedule) -> Iterator[Violation]:
    """Run every rank as far as it comes; what the ranks wait for then."""
    done: set[Action] = set()
    all_of_them = {action for rank in range(schedule.ranks) for action in schedule.actions(rank)}
    at = [0] * schedule.ranks

    def lacks(rank: int) -> list[tuple[Action, Action]]:
        """Pairs of an action and what it waits for."""
        step = actions(schedule.orders[rank][at[rank]])
        missing = [(action, needed) for action in step for needed in schedule.dependencies(action)]
        unmet = [(action, needed) for action, needed in missing if not done.intersection(needed)]
        return [(action, next(one for one in needed if one in all_of_them)) for action, needed in unmet]

    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(schedule.orders):
            while at[rank] < len(order) and not lacks(rank):
                done.update(actions(order[at[rank]]))
                at[rank] += 1
                moved = True
    for rank, order in enumerate(schedule.orders):
        if at[rank] < len(order):
            for action, needed in lacks(rank):
                yield Violation(rank, action, f"(number {at[rank] + 1} in its row) waits for ever for {needed}")

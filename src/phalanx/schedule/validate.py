"""Validation of schedules: every computation once, each after its dependencies, and no deadlock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from phalanx.schedule.schedule import Action, Grid, Schedule, actions
from phalanx.spec.errors import UserError


@dataclass(frozen=True)
class Violation:
    """The problem of one action."""

    rank: int
    action: Action
    problem: str

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.action} {self.problem}"


def check_schedule(schedule: Schedule) -> None:
    """Raise UserError with the first violations of a schedule, if there are any."""
    if problems := violations(schedule):
        listing = "; ".join(map(str, problems[:3])) + ("; ..." if len(problems) > 3 else "")
        fix = "list all of them with phalanx pipeline check FILE.csv"
        raise UserError("schedule", None, f"has {len(problems)} violations: {listing}", fix=fix)


def violations(schedule: Schedule) -> list[Violation]:
    """Return the problems of a schedule whose ranks run asynchronously; empty if it is valid."""
    return [*_find_misplaced_stages(schedule), *_find_wrong_counts(schedule)] or list(_find_deadlock(schedule))


def lockstep_violations(grid: Grid) -> list[Violation]:
    """Return the problems of a grid in which every action takes one tick.

    They include an action that is not later than its dependencies."""
    schedule = Schedule.from_rows(grid)
    ticks: dict[Action, int] = {}
    for row in grid:
        for tick, step in enumerate(row):
            for action in actions(step) if step else ():
                ticks.setdefault(action, tick)
    problems = [*_find_misplaced_stages(schedule), *_find_wrong_counts(schedule)]
    for rank in range(schedule.ranks):
        for action in schedule.actions(rank):
            for alternatives in schedule.dependencies(action):
                scheduled = [alternative for alternative in alternatives if alternative in ticks]
                if scheduled and min(ticks[alternative] for alternative in scheduled) >= ticks[action]:
                    reason = f"in tick {ticks[action]}, before {scheduled[0]} is done, in tick {ticks[scheduled[0]]}"
                    problems.append(Violation(rank, action, f"runs {reason}"))
    return problems


def _find_misplaced_stages(schedule: Schedule) -> Iterator[Violation]:
    """Yield a violation for each stage on more than one rank."""
    for rank in range(schedule.ranks):
        foreign_actions = {
            a.stage: a for a in reversed(list(schedule.actions(rank))) if schedule.rank_of[a.stage] != rank
        }
        for stage, action in sorted(foreign_actions.items()):
            yield Violation(rank, action, f"belongs to a stage of rank {schedule.rank_of[stage]}")


def _find_wrong_counts(schedule: Schedule) -> Iterator[Violation]:
    """Yield violations for actions that are missing or repeated.

    Each micro-batch needs a forward pass, and a full backward pass or its two halves, in each stage."""
    counts = Counter(action for rank in range(schedule.ranks) for action in schedule.actions(rank))
    for stage in range(schedule.stages):
        rank = schedule.rank_of.get(stage, 0)
        for micro in range(schedule.micro_batches):
            kind_counts = {kind: counts[Action(stage, kind, micro)] for kind in ("F", "B", "I", "W")}
            is_split = bool(kind_counts["I"] or kind_counts["W"])
            expected = {"F": 1, "B": int(not is_split), "I": int(is_split), "W": int(is_split)}
            for kind, expected_count in expected.items():
                if kind_counts[kind] != expected_count:
                    action = Action(stage, kind, micro)  # type: ignore[arg-type]
                    count = kind_counts[kind]
                    problem = (
                        "runs in addition to its I and W halves"
                        if count and not expected_count
                        else f"runs {count} times"
                    )
                    yield Violation(rank, action, "is missing" if not count else problem)


def _find_deadlock(schedule: Schedule) -> Iterator[Violation]:
    """Run every rank as far as possible, and yield the dependencies that ranks wait for."""
    done: set[Action] = set()
    all_actions = {action for rank in range(schedule.ranks) for action in schedule.actions(rank)}
    next_index = [0] * schedule.ranks

    def unmet_dependencies(rank: int) -> list[tuple[Action, Action]]:
        """Return pairs of an action and an unmet dependency."""
        step = actions(schedule.orders[rank][next_index[rank]])
        requirements = [(action, dependency) for action in step for dependency in schedule.dependencies(action)]
        unmet = [(action, dependency) for action, dependency in requirements if not done.intersection(dependency)]
        return [
            (action, next(candidate for candidate in dependency if candidate in all_actions))
            for action, dependency in unmet
        ]

    progressed = True
    while progressed:
        progressed = False
        for rank, order in enumerate(schedule.orders):
            while next_index[rank] < len(order) and not unmet_dependencies(rank):
                done.update(actions(order[next_index[rank]]))
                next_index[rank] += 1
                progressed = True
    for rank, order in enumerate(schedule.orders):
        if next_index[rank] < len(order):
            for action, dependency in unmet_dependencies(rank):
                yield Violation(
                    rank, action, f"(number {next_index[rank] + 1} in its row) waits forever for {dependency}"
                )

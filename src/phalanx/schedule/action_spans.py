"""Computations of a rank in time, simulated or measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

from phalanx.schedule.schedule import Action, ScheduleStep, actions
from phalanx.schedule.simulate import Time

SpanRow = tuple[str, int, int, float, float]
"""A span in a file: kind, stage, micro-batch, start and end."""


@dataclass(frozen=True, kw_only=True)
class ActionSpan:
    """Start and end of one computation."""

    action: Action
    start: float
    end: float

    @property
    def seconds(self) -> float:
        """The duration."""
        return self.end - self.start

    def shifted(self, seconds: float) -> ActionSpan:
        """Return the span that many seconds later."""
        return ActionSpan(action=self.action, start=self.start + seconds, end=self.end + seconds)

    def to_row(self) -> SpanRow:
        """Return the row of a file."""
        return str(self.action.kind), self.action.stage, self.action.micro, self.start, self.end

    @classmethod
    def from_row(cls, row: Sequence[Any]) -> Self:
        """Return the span in the row of a file."""
        kind, stage, micro, start, end = row
        return cls(action=Action(stage, kind, micro), start=start, end=end)


def spans_of_step(step: ScheduleStep, start: Time, end: Time) -> Iterator[ActionSpan]:
    """Yield the computations of a step. Two overlapping ones follow each other, with half of the time each."""
    step_actions = actions(step)
    duration = float(end - start) / len(step_actions)
    for index, action in enumerate(step_actions):
        yield ActionSpan(
            action=action, start=float(start) + index * duration, end=float(start) + (index + 1) * duration
        )

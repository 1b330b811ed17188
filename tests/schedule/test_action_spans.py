"""Start and end times of actions."""

from __future__ import annotations

from fractions import Fraction

from phalanx.schedule.action_spans import ActionSpan, spans_of_step
from phalanx.schedule.schedule import Action, OverlappedPair


def test_overlapping_actions_share_the_time_of_their_step() -> None:
    forward, backward = Action(0, "F", 3), Action(1, "B", 2)
    assert list(spans_of_step(OverlappedPair(forward, backward), Fraction(1), Fraction(4))) == [
        ActionSpan(action=forward, start=1.0, end=2.5),
        ActionSpan(action=backward, start=2.5, end=4.0),
    ]


def test_row_of_span_is_read_again() -> None:
    span = ActionSpan(action=Action(1, "W", 5), start=0.5, end=2.0)
    assert span.to_row() == ("W", 1, 5, 0.5, 2.0)
    assert ActionSpan.from_row(list(span.to_row())).shifted(1.0) == ActionSpan(action=span.action, start=1.5, end=3.0)

"""When a loss is beyond repair, and how a run goes back to where it was not."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from phalanx.measure.events import ROLLED_BACK, note, read_events
from phalanx.spec.errors import UserError
from phalanx.train.manifest import newest_intact, step_of

HISTORY, LEAST = 50, 10
"""Steps whose losses say what is usual, and how many it takes."""


class DivergenceError(RuntimeError):
    """Training cannot go on from here: all ranks found so together, and `blamed` are those that it is due to."""

    def __init__(self, said: str, blamed: Sequence[int] = ()) -> None:
        super().__init__(said)
        self.blamed = list(blamed)


class CorruptionError(DivergenceError):
    """Ranks no longer hold alike what they must: nobody knows since when, so that no checkpoint is known to be good."""


class Losses:
    """The losses of the last steps."""

    def __init__(self, spike: float | None) -> None:
        self.spike = spike
        self._last: deque[float] = deque(maxlen=HISTORY)

    def spikes(self, loss: float) -> float | None:
        """How many times the median of the steps before it a loss is, where that makes it a spike."""
        ratio = loss / median(self._last) if len(self._last) >= LEAST else 1.0
        if self.spike is not None and math.isfinite(loss) and ratio > self.spike:
            return ratio
        if math.isfinite(loss):
            self._last.append(loss)
        return None


def rollbacks(directory: Path) -> int:
    """How often a run has gone back."""
    return sum(event["what"] == ROLLED_BACK for event in read_events(directory))


def roll_back(directory: Path, step: int, reason: str) -> int:
    """Note that a run goes back from a step to its newest checkpoint, or to its beginning; returns to which step.

    The text of the steps between is passed over then, and whenever the run returns to that checkpoint.
    Raises UserError where that cannot be noted.
    """
    checkpoint, _ = newest_intact(directory / "checkpoints")
    to = step_of(checkpoint) if checkpoint else 0
    before = rollbacks(directory)
    note(directory, ROLLED_BACK, after=step, to=to, reason=reason)
    if rollbacks(directory) == before:
        raise UserError("out", str(directory), "cannot be written to, and a run that goes back must note it there")
    return to


def passed_over(directory: Path, step: int) -> int:
    """Steps whose text is not learned from after the checkpoint of a step, since that led astray."""
    back = [event for event in read_events(directory) if event["what"] == ROLLED_BACK and event["to"] == step]
    return sum(int(event["after"]) - step for event in back)

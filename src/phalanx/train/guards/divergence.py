"""When a loss is beyond repair, and how a run goes back to where it was not."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from phalanx.runs.events import ROLLED_BACK, append_event, read_events
from phalanx.spec.errors import UserError

HISTORY = 50
MIN_HISTORY = 10
"""Steps whose losses say what is usual, and how many it takes."""


class LossSpikeDetector:
    """The losses of the last steps."""

    def __init__(self, max_ratio: float | None) -> None:
        self.spike_threshold = max_ratio
        self._recent_losses: deque[float] = deque(maxlen=HISTORY)

    def spike_ratio(self, loss: float) -> float | None:
        """How many times the median of the steps before it a loss is, where that makes it a spike."""
        ratio = loss / median(self._recent_losses) if len(self._recent_losses) >= MIN_HISTORY else 1.0
        if self.spike_threshold is not None and math.isfinite(loss) and ratio > self.spike_threshold:
            return ratio
        if math.isfinite(loss):
            self._recent_losses.append(loss)
        return None


def count_rollbacks(directory: Path) -> int:
    """How often a run has gone back."""
    return len(_rollback_events(directory))


def has_diverged_again(directory: Path, newest: int) -> bool:
    """Whether a run has gone back to the checkpoint of its newest step already, and saved nothing since: then it is
    that checkpoint which leads astray, and not the text behind it."""
    rollbacks = _rollback_events(directory)
    return bool(rollbacks) and rollbacks[-1]["to"] == newest > 0


def record_rollback(directory: Path, step: int, to_step: int, reason: str) -> None:
    """Note that a run goes back from a step to that of a checkpoint, or to its beginning.

    The text of the steps between is passed over then, and whenever the run returns to that checkpoint.
    Raises UserError where that cannot be noted.
    """
    count_before = count_rollbacks(directory)
    append_event(directory, ROLLED_BACK, after=step, to=to_step, reason=reason)
    if count_rollbacks(directory) == count_before:
        raise UserError(
            "output_dir", str(directory), "cannot be written to, and a run that goes back must note it there"
        )


def steps_to_skip(directory: Path, step: int) -> int:
    """Steps whose text is not learned from after the checkpoint of a step, since that led astray: those that the run
    went back by to it, and those that had been passed over already after checkpoints that it then left behind."""
    skipped: dict[int, int] = {}
    for event in _rollback_events(directory):
        to_step = int(event["to"])
        from_step = int(event["after"])
        newer_steps = [newer_step for newer_step in skipped if newer_step > to_step]
        skipped[to_step] = (
            skipped.get(to_step, 0) + from_step - to_step + sum(skipped.pop(newer_step) for newer_step in newer_steps)
        )
    return skipped.get(step, 0)


def _rollback_events(directory: Path) -> list[Mapping[str, Any]]:
    return [event for event in read_events(directory) if event["what"] == ROLLED_BACK]

"""Detection of divergence, and rollbacks to a step before it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from phalanx.runs.events import ROLLED_BACK, append_event, read_events, skipped_steps
from phalanx.spec.errors import UserError

HISTORY = 50
MIN_HISTORY = 10
"""Number of last steps in the median loss, and minimum number for it."""


class LossSpikeDetector:
    """Detector of spikes relative to the median loss of the last steps."""

    def __init__(self, max_ratio: float | None) -> None:
        self.spike_threshold = max_ratio
        self._recent_losses: deque[float] = deque(maxlen=HISTORY)

    def spike_ratio(self, loss: float) -> float | None:
        """Return the ratio of a loss to the median of the previous steps if it is a spike, else None."""
        ratio = loss / median(self._recent_losses) if len(self._recent_losses) >= MIN_HISTORY else 1.0
        if self.spike_threshold is not None and math.isfinite(loss) and ratio > self.spike_threshold:
            return ratio
        if math.isfinite(loss):
            self._recent_losses.append(loss)
        return None


def count_rollbacks(directory: Path) -> int:
    """Return the number of rollbacks of a run."""
    return len(_read_rollback_events(directory))


def has_diverged_again(directory: Path, newest: int) -> bool:
    """Return whether the last rollback of a run was to its newest checkpoint.

    Then the run has saved nothing since, and the checkpoint is the cause of the divergence, not the text after it."""
    rollbacks = _read_rollback_events(directory)
    return bool(rollbacks) and rollbacks[-1]["to"] == newest > 0


def record_rollback(directory: Path, step: int, to_step: int, reason: str) -> None:
    """Record a rollback from a step to the step of a checkpoint, or to the start of the run.

    The text of the steps between is skipped now, and whenever the run returns to that checkpoint. Raises UserError if
    the event cannot be written."""
    count_before = count_rollbacks(directory)
    append_event(directory, ROLLED_BACK, after=step, to=to_step, reason=reason)
    if count_rollbacks(directory) == count_before:
        raise UserError("output_dir", str(directory), "is not writable, but a rollback must be recorded in it")


def steps_to_skip(directory: Path, step: int) -> int:
    """Return the number of steps whose text is skipped after the checkpoint of a step."""
    return skipped_steps(read_events(directory)).get(step, 0)


def _read_rollback_events(directory: Path) -> list[Mapping[str, Any]]:
    return [event for event in read_events(directory) if event["kind"] == ROLLED_BACK]

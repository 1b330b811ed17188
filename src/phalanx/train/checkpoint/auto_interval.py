"""Schedule of checkpoints: at a fixed interval, or by the cost of a save and the run's failure rate."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from statistics import median

from phalanx.cost.formulas.reliability import mtbf_seconds, observed_mtbf_seconds, optimal_interval_seconds
from phalanx.plan.training_cost import failure_rate
from phalanx.runs.events import failure_count_and_uptime
from phalanx.spec.formatting import format_duration
from phalanx.spec.run import RunSpec

FIRST_STEPS = 10
"""Number of steps before the first checkpoint of a start, as nothing is measured yet."""
REPORT_CHANGE_RATIO = 1.5
"""Minimum ratio between two intervals for another message."""


class CheckpointScheduler:
    """The steps after which a run is saved.

    If `checkpoint.every` is "auto", rank 0 decides after every save when the next is due (`next_due_step`), and
    broadcasts it."""

    def __init__(self, run: RunSpec, ranks: int, directory: Path) -> None:
        self.every = run.checkpoint.every
        self.directory = directory
        self.next_step = FIRST_STEPS
        """With "auto", the step after which the next checkpoint is due."""
        self.reason: str | None = None
        """Message about a changed interval, if any."""
        self._expected_mtbf_seconds = mtbf_seconds(failure_rate(run), ranks)
        self._step_seconds: deque[float] = deque(maxlen=50)
        self._blocked_seconds: float | None = None
        """Seconds for which the last save blocked training."""
        self._write_in_progress = False
        """True if the last save was still being written at the end of the last step."""
        self._overlapped_steps = 0
        """Number of steps that began while a save was being written."""
        self._overlapped_seconds = 0.0
        """Total seconds of these steps."""
        self._cost_seconds: deque[float] = deque(maxlen=9)
        """Costs of the previous saves; a single one may be several times another."""
        self._reported_steps = 0

    def start(self, step: int) -> None:
        """Continue after a step."""
        self.next_step = step + FIRST_STEPS

    def record_step(self, seconds: float, writing: bool = False) -> None:
        """Record the duration of a step. `writing`: the previous save is still being written to disk."""
        self._step_seconds.append(seconds)
        if self._write_in_progress:
            self._overlapped_steps += 1
            self._overlapped_seconds += seconds
        self._write_in_progress = writing

    def is_due(self, step: int) -> bool:
        """Return whether the state after this step is to be saved."""
        if self.every == "auto":
            return step >= self.next_step
        return self.every > 0 and step % self.every == 0

    def next_due_step(self, step: int, blocked_seconds: float, write_seconds: float) -> int:
        """Return the step after which the next save is due.

        A save costs the time that it blocks training, and the slowdown of the steps during which it is written.
        `blocked_seconds` is of this save, `write_seconds` the total time of the previous one, in the background."""
        failures, seconds = failure_count_and_uptime(self.directory)
        mtbf = observed_mtbf_seconds(self._expected_mtbf_seconds, failures, seconds)
        step_seconds = median(self._step_seconds)
        # Writing slows training, because it uses cores, memory bandwidth and the network.
        if self._blocked_seconds is not None:
            slowed_by = max(0.0, self._overlapped_seconds - self._overlapped_steps * step_seconds)
            self._cost_seconds.append(self._blocked_seconds + slowed_by)
        self._blocked_seconds = blocked_seconds
        self._write_in_progress = True
        self._overlapped_steps = 0
        self._overlapped_seconds = 0.0
        cost = median(self._cost_seconds or [blocked_seconds])
        steps = max(1, round(max(optimal_interval_seconds(cost, mtbf), write_seconds) / step_seconds))
        changed = max(steps, self._reported_steps) > REPORT_CHANGE_RATIO * min(steps, self._reported_steps)
        self.reason = None
        if changed:
            observed = f" ({failures} in {format_duration(seconds)})" if mtbf < self._expected_mtbf_seconds else ""
            interval = f"a checkpoint every {steps:,} steps ({format_duration(steps * step_seconds)})"
            failure_text = f"expected time between failures: {format_duration(mtbf)}{observed}"
            self.reason = f"{interval}: one costs {format_duration(cost)} of training; {failure_text}"
            self._reported_steps = steps
        self.next_step = step + steps
        return self.next_step

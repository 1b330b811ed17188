"""When checkpoints are due: every so many steps, or as often as the time of a save and the run's failures call for."""

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
"""Until the first checkpoint of a start, of which nothing is known yet."""
REPORT_CHANGE_RATIO = 1.5
"""Times by which an interval changes before it is said again."""


class CheckpointScheduler:
    """The steps after which a run is saved. Where `checkpoint.every` is "auto", rank 0 decides after every save when
    the next is due (`decide`), and tells the others."""

    def __init__(self, run: RunSpec, ranks: int, directory: Path) -> None:
        self.every = run.checkpoint.every
        self.directory = directory
        self.next_step = FIRST_STEPS
        """With "auto", the step after which the next is due."""
        self.reason: str | None = None
        """Why, where that is to be said."""
        self._expected_mtbf_seconds = mtbf_seconds(failure_rate(run), ranks)
        self._step_seconds: deque[float] = deque(maxlen=50)
        self._blocked_seconds: float | None = None
        """For which the last save kept training waiting."""
        self._write_in_progress = False
        self._overlapped_steps = 0
        self._overlapped_seconds = 0.0
        """Whether it was being written when the next step began; of how many steps that was so, and how long they took
        together."""
        self._cost_seconds: deque[float] = deque(maxlen=9)
        """Of the saves before it; that of one alone may be several times another's."""
        self._reported_steps = 0

    def start(self, step: int) -> None:
        """Go on after a step."""
        self.next_step = step + FIRST_STEPS

    def due(self, step: int, seconds: float, writing: bool = False) -> bool:
        """Whether the state after this step, which took so long, is to be saved; `writing` says that the last one saved
        is not all on disk yet."""
        self._step_seconds.append(seconds)
        if self._write_in_progress:
            self._overlapped_steps, self._overlapped_seconds = (
                self._overlapped_steps + 1,
                self._overlapped_seconds + seconds,
            )
        self._write_in_progress = writing
        if self.every == "auto":
            return step >= self.next_step
        return self.every > 0 and step % self.every == 0

    def next_due_step(self, step: int, blocked_seconds: float, write_seconds: float) -> int:
        """The step after which the next save is due, when this one kept training waiting for `blocked_seconds` and the
        one before took `write_seconds` in all, behind it. A save costs that wait, and by how much longer than usual the
        steps took behind which it was written."""
        failures, seconds = failure_count_and_uptime(self.directory)
        mtbf = observed_mtbf_seconds(self._expected_mtbf_seconds, failures, seconds)
        step_seconds = median(self._step_seconds)
        if self._blocked_seconds is not None:  # writing takes cores, and memory's and the network's speed
            slowed_by = max(0.0, self._overlapped_seconds - self._overlapped_steps * step_seconds)
            self._cost_seconds.append(self._blocked_seconds + slowed_by)
        self._blocked_seconds = blocked_seconds
        self._write_in_progress = True
        self._overlapped_steps = 0
        self._overlapped_seconds = 0.0
        cost = median(self._cost_seconds or [blocked_seconds])
        steps = max(1, round(max(optimal_interval_seconds(cost, mtbf), write_seconds) / step_seconds))
        changed = max(steps, self._reported_steps) > REPORT_CHANGE_RATIO * min(steps, self._reported_steps)
        observed_text = f" ({failures} in {format_duration(seconds)})" if mtbf < self._expected_mtbf_seconds else ""
        self.reason = (
            f"a checkpoint every {steps:,} steps ({format_duration(steps * step_seconds)}): one costs "
            f"{format_duration(cost)} of training, "
            f"and a failure is to be expected every {format_duration(mtbf)}{observed_text}"
            if changed
            else None
        )
        self._reported_steps = steps if changed else self._reported_steps
        self.next_step = step + steps
        return self.next_step

"""Progress of a run on rank 0: a bar on a terminal, or a periodic line."""

from __future__ import annotations

import logging
import time
from typing import Any, Self

from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from phalanx.runs.metrics import has_ignored_targets
from phalanx.spec.log import PROGRESS
from phalanx.spec.terminal import Terminal

logger = logging.getLogger(PROGRESS)

SECONDS_BETWEEN_LINES = 10.0


class ProgressDisplay:
    """Display of the steps of a run; `quiet` disables it."""

    def __init__(self, step: int, steps: int | None, quiet: bool) -> None:
        self.steps = steps
        self.quiet = quiet
        self.console = Terminal(stderr=True)
        self._started_at = time.monotonic()
        self._first_step = step
        self._shown_at = 0.0
        self._bar: Bar | None = None
        if self.console.is_terminal and not quiet and logger.isEnabledFor(logging.INFO):
            count = TextColumn("{task.completed}/{task.total}")
            description = TextColumn("{task.description}")
            self._bar = Bar(BarColumn(), count, description, TimeRemainingColumn(), console=self.console)
            self._task = self._bar.add_task("", total=steps, completed=step)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def set_steps(self, steps: int) -> None:
        """Set the number of steps of a run, which may be decided or reduced after its start."""
        self.steps = steps
        if self._bar is not None:
            self._bar.update(self._task, total=steps)

    def advance(self, record: dict[str, Any]) -> None:
        """Show a finished step."""
        if self.quiet:
            return
        text = format_metrics(record)
        if self._bar is not None:
            self._bar.update(self._task, completed=record["step"], description=text)
            return
        now = time.monotonic()
        is_last = record["step"] == self.steps
        if is_last or now - self._shown_at >= SECONDS_BETWEEN_LINES:
            self._shown_at = now
            step = record["step"]
            remaining = ""
            if self.steps is not None:
                seconds_per_step = (now - self._started_at) / max(1, step - self._first_step)
                minutes, seconds = divmod(int(seconds_per_step * (self.steps - step)), 60)
                remaining = f"/{self.steps}  {minutes}:{seconds:02d} left"
            self.log(f"step {step}{remaining}  {text}")

    def log(self, text: str) -> None:
        """Log a line, which is above the bar on a terminal."""
        if not self.quiet:
            logger.info("%s", text)


def format_metrics(record: dict[str, Any]) -> str:
    """Return the main metrics of a step as text."""
    parts = [f"loss {record['loss']:.3f}", f"{record['tokens_per_second']:,.0f} tokens/s"]
    if "pair_accuracy" in record:
        parts.insert(1, f"accuracy {record['pair_accuracy']:.0%}")
    if "kl_loss" in record:
        parts.insert(1, f"KL {record['kl_loss']:.3f}")
    if has_ignored_targets(record):
        parts.append(f"{record['targets_per_second']:,.0f} targets/s")
    if "mfu" in record:
        parts.append(f"MFU {record['mfu']:.1%}")
    return "  ".join(parts)

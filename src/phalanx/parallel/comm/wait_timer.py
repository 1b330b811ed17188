"""Exposed communication time: the time that this rank waits and computation does not hide.

Why: `docs/design/decisions/wait-timer.md`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist


class WaitTimer:
    """The time in which the host waits for collectives.

    It is exact on the CPU, where waiting blocks the host. On a GPU the host does not wait, and the total stays 0."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """Seconds since the last `pop_seconds`."""
        self.spans: list[tuple[float, float]] | None = None
        """Start and end of each wait, by time.perf_counter(); None unless a caller sets a list."""

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Count the time spent inside."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(start, time.perf_counter())

    def add(self, start: float, end: float) -> None:
        """Count a wait from `start` to `end`."""
        self.seconds += end - start
        if self.spans is not None:
            self.spans.append((start, end))

    def pop_seconds(self) -> float:
        """Return the seconds since the last call."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds


class TimedWork(dist.Work):
    """A pending collective whose wait is counted."""

    def __init__(self, work: dist.Work, comm_wait: WaitTimer) -> None:
        super().__init__()
        self.work = work
        self.comm_wait = comm_wait

    def wait(self, *timeout: timedelta) -> bool:
        """Wait for the collective."""
        with self.comm_wait.measure():
            return self.work.wait(*timeout)

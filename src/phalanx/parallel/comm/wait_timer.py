"""How long this rank stood still for communication: the part of it that computation did not hide."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist


class WaitTimer:
    """The spans in which the host waited for a collective. Exact on the CPU, where waiting blocks the host; on a GPU
    the host does not wait, and the total stays 0."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """Since the last `take`."""
        self.spans: list[tuple[float, float]] | None = None
        """Each span, by time.perf_counter(), while somebody keeps a list here."""

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Count the time spent inside."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(start, time.perf_counter())

    def add(self, start: float, end: float) -> None:
        """Count a span that was waited."""
        self.seconds += end - start
        if self.spans is not None:
            self.spans.append((start, end))

    def pop_seconds(self) -> float:
        """The seconds since the last call."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds


class TimedWork(dist.Work):
    """A collective under way whose wait is counted."""

    def __init__(self, work: dist.Work, exposed: WaitTimer) -> None:
        super().__init__()
        self.work = work
        self.exposed = exposed

    def wait(self, *timeout: timedelta) -> bool:
        with self.exposed.measure():
            return self.work.wait(*timeout)

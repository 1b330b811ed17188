"""How long this rank stood still for communication: the part of it that computation did not hide."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist


class ExposedTime:
    """Adds up the seconds in which the host waited for a collective. Exact on the CPU, where waiting blocks the host;
    on a GPU the host does not wait, and the total stays 0."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time spent inside."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - begun

    def take(self) -> float:
        """The seconds since the last call."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds


class TimedWork(dist.Work):
    """A collective under way whose wait is counted."""

    def __init__(self, work: dist.Work, exposed: ExposedTime) -> None:
        super().__init__()
        self.work, self.exposed = work, exposed

    def wait(self, *timeout: timedelta) -> bool:
        with self.exposed.waiting():
            return self.work.wait(*timeout)

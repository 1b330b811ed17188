"""When things happened on a device: a GPU runs behind its host, and keeps time of its own."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

Mark = Any
"""A moment, until `Clock.read` says when it was: of the host a number, of a GPU an event."""


class Clock:
    """Moments of the host on a CPU, and of the stream of a GPU, both told by time.perf_counter()."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def now(self) -> Mark:
        """This moment."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def read(self, marks: Sequence[Mark]) -> list[float]:
        """When they were, in seconds. Waits for a GPU to come to the last."""
        if self.device.type != "cuda":
            return list(marks)
        end = self.now()
        torch.cuda.synchronize(self.device)
        over = time.perf_counter()
        return [over - mark.elapsed_time(end) / 1e3 for mark in marks]


HOST = Clock(torch.device("cpu"))

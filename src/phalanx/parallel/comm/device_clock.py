"""When things happened on a device: a GPU runs behind its host, and keeps time of its own."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

Timestamp = Any
"""A moment, until `DeviceClock.resolve` says when it was: of the host a number, of a GPU an event."""


class DeviceClock:
    """Moments of the host on a CPU, and of the stream of a GPU, both told by time.perf_counter()."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def record(self) -> Timestamp:
        """This moment."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def resolve(self, timestamps: Sequence[Timestamp]) -> list[float]:
        """When they were, in seconds. Waits for a GPU to come to this moment."""
        if self.device.type != "cuda":
            return list(timestamps)
        end = self.record()
        end.synchronize()
        now_seconds = time.perf_counter()
        return [now_seconds - timestamp.elapsed_time(end) / 1e3 for timestamp in timestamps]


HOST_CLOCK = DeviceClock(torch.device("cpu"))

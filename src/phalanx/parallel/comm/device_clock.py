"""When things happened on a device: a GPU runs behind its host, and keeps time of its own."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

Timestamp = Any
"""A moment, until `DeviceClock.resolve` says when it was: of the host a number, of a GPU an event."""


MAX_ANCHOR_AGE_SECONDS = 10.0
"""The clocks of a GPU and of its host drift apart by some millionths."""


class DeviceClock:
    """Moments of the host on a CPU, and of the stream of a GPU, both told by time.perf_counter()."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._anchor: tuple[Timestamp, float] | None = None
        """An event of the GPU, and when the host saw that it had happened."""

    def record(self) -> Timestamp:
        """This moment."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def resolve(self, timestamps: Sequence[Timestamp]) -> list[float]:
        """When they were, in seconds. Waits for a GPU unless it has come to all of them."""
        if self.device.type != "cuda":
            return list(timestamps)
        anchor = self._anchor
        is_recent = anchor is not None and time.perf_counter() - anchor[1] < MAX_ANCHOR_AGE_SECONDS
        if anchor is None or not is_recent or not all(timestamp.query() for timestamp in timestamps):
            event = self.record()
            torch.cuda.synchronize(self.device)
            anchor = self._anchor = event, time.perf_counter()
        event, seconds = anchor
        return [seconds - timestamp.elapsed_time(event) / 1e3 for timestamp in timestamps]


HOST_CLOCK = DeviceClock(torch.device("cpu"))

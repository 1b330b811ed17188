"""Timestamps of events on a device: a GPU runs asynchronously to its host, with its own clock."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

Timestamp = Any
"""A point in time for `DeviceClock.resolve`: a number for the host, an event for a GPU."""


MAX_ANCHOR_AGE_SECONDS = 10.0
"""Maximum age of the anchor; the clocks of a GPU and its host drift by some millionths."""


class DeviceClock:
    """Timestamps of the host or of a GPU's stream, both in seconds of time.perf_counter()."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._anchor: tuple[Timestamp, float] | None = None
        """An event of the GPU, and the host time at which it was seen to be complete."""

    def record(self) -> Timestamp:
        """Return a timestamp of the current time."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def resolve(self, timestamps: Sequence[Timestamp]) -> list[float]:
        """Return timestamps in seconds; waits until a GPU has reached them, or for all its work to renew the anchor."""
        if self.device.type != "cuda":
            return list(timestamps)
        for timestamp in timestamps:
            if not timestamp.query():
                timestamp.synchronize()
        anchor = self._anchor
        if anchor is None or time.perf_counter() - anchor[1] > MAX_ANCHOR_AGE_SECONDS:
            event = self.record()
            torch.cuda.synchronize(self.device)
            anchor = self._anchor = event, time.perf_counter()
        event, seconds = anchor
        return [seconds - timestamp.elapsed_time(event) / 1e3 for timestamp in timestamps]


HOST_CLOCK = DeviceClock(torch.device("cpu"))

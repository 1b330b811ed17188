"""Times of a GPU's events by the host's clock, with simulated events."""

from __future__ import annotations

import time
from dataclasses import dataclass

import pytest
import torch

from phalanx.parallel.comm import device_clock
from phalanx.parallel.comm.device_clock import DeviceClock


@dataclass
class FakeEvent:
    """An event that the GPU reaches `milliseconds` after it began, if it has."""

    milliseconds: float
    is_reached: bool = True
    num_waits: int = 0

    def query(self) -> bool:
        return self.is_reached

    def synchronize(self) -> None:
        self.num_waits += 1

    def elapsed_time(self, later: FakeEvent) -> float:
        return later.milliseconds - self.milliseconds


class FakeGpuClock(DeviceClock):
    """The clock of a GPU that is at millisecond `now`; counts how often the host waited for it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(torch.device("cuda"))
        self.now, self.waits = 0.0, 0
        monkeypatch.setattr(torch.cuda, "synchronize", self._wait)
        monkeypatch.setattr(time, "perf_counter", lambda: 100 + self.now / 1e3)

    def _wait(self, _: torch.device) -> None:
        self.waits += 1

    def record(self) -> FakeEvent:
        return FakeEvent(self.now)


def test_resolve_waits_only_for_events_that_are_not_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeGpuClock(monkeypatch)
    clock.now = 500.0
    assert clock.resolve([FakeEvent(100.0), FakeEvent(200.0)]) == pytest.approx([100.1, 100.2])
    assert clock.waits == 1
    clock.now = 900.0
    assert clock.resolve([FakeEvent(400.0), FakeEvent(700.0)]) == pytest.approx([100.4, 100.7])
    assert clock.waits == 1
    reached, running = FakeEvent(400.0), FakeEvent(890.0, is_reached=False)
    assert clock.resolve([reached, running]) == pytest.approx([100.4, 100.89])
    assert (reached.num_waits, running.num_waits) == (0, 1)
    assert clock.waits == 1, "the GPU may run later work meanwhile"


def test_resolve_compares_the_clocks_again_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeGpuClock(monkeypatch)
    clock.resolve([FakeEvent(0.0)])
    clock.now = 1e3 * (device_clock.MAX_ANCHOR_AGE_SECONDS + 1)
    clock.resolve([FakeEvent(0.0)])
    assert clock.waits == 2

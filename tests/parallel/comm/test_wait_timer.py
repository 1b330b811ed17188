"""Seconds that a rank waited, with a simulated clock."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from phalanx.parallel.comm.wait_timer import TimedWork, WaitTimer


class FakeClock:
    """Seconds that pass only when the test advances them."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    clock = FakeClock()
    monkeypatch.setattr(time, "perf_counter", clock)
    return clock


def test_wait_timer_sums_measured_seconds_and_resets_on_pop(clock: FakeClock) -> None:
    timer = WaitTimer()
    for seconds in (2.0, 3.0):
        with timer.measure():
            clock.now += seconds
        clock.now += 50.0
    assert timer.pop_seconds() == 5.0
    assert timer.pop_seconds() == 0.0


def test_wait_timer_counts_wait_that_raises(clock: FakeClock) -> None:
    timer = WaitTimer()

    def fail() -> None:
        with timer.measure():
            clock.now += 7.0
            raise RuntimeError("a rank is gone")

    with pytest.raises(RuntimeError):
        fail()
    assert timer.pop_seconds() == 7.0


def test_timed_work_records_collective_wait(clock: FakeClock) -> None:
    class Work(dist.Work):
        def wait(self, *timeout: timedelta) -> bool:
            clock.now += 4.0
            return timeout == (timedelta(seconds=9),)

    timer = WaitTimer()
    assert TimedWork(Work(), timer).wait(timedelta(seconds=9))
    assert timer.pop_seconds() == 4.0

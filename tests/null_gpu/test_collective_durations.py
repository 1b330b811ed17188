"""Durations of NCCL's collectives, by events of the null GPU."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from phalanx.parallel.comm.device_clock import DeviceClock
from phalanx.train.profiling.collective_recorder import CollectiveCall, CollectiveRecorder

CLOCK_ERROR_SECONDS = 0.01


@pytest.fixture
def device() -> Iterator[torch.device]:
    """Return a GPU, and initialize a process group of one process."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield torch.device("cuda", 0)
    dist.destroy_process_group()


def record_calls(device: torch.device) -> tuple[list[CollectiveCall], float]:
    """Record three collectives, two of which return work; return the
    records, and the times of completion on the host."""
    numbers, clock = torch.ones(1000, device=device), DeviceClock(device)
    dist.all_reduce(numbers)  # makes the communicator
    with CollectiveRecorder(clock=clock) as recorder:
        dist.all_reduce(numbers)
        first, second = (
            dist.all_reduce(numbers, async_op=True),
            dist.all_gather_into_tensor(numbers, numbers, async_op=True),
        )
    over_at = time.perf_counter()
    time.sleep(0.05)
    first.wait()
    second.wait()
    recorder.resolve_device_times()
    return recorder.calls, over_at


def test_collectives_end_on_the_gpu(device: torch.device) -> None:
    began_at = time.perf_counter()
    calls, over_at = record_calls(device)
    assert [call.operation for call in calls] == ["all_reduce", "all_reduce", "all_gather"]
    for call in calls:
        assert call.end is not None
        assert began_at - CLOCK_ERROR_SECONDS < call.start <= call.end < over_at + CLOCK_ERROR_SECONDS


def test_ends_are_recorded_under_streams_that_wait_for_nccl(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = []

    def record(clock: DeviceClock) -> torch.cuda.Event:
        streams.append(torch.cuda.current_stream(clock.device))
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    monkeypatch.setattr(DeviceClock, "record", record)
    record_calls(device)
    compute = torch.cuda.current_stream(device)
    blocking, first, second = (streams[:2], streams[2:4], streams[4:6])
    assert blocking == [compute, compute]
    assert first[0] == second[0] == compute
    assert compute not in (first[1], second[1])

"""Time of calls on a device."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise

import torch


def time_calls(call: Callable[[], object], device: torch.device, iterations: int) -> list[float]:
    """Return the seconds of each of `iterations` consecutive calls, after one warm-up call.

    On a GPU, CUDA events measure without waiting for the host between calls; on a CPU, the clock does.
    """
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(iterations + 1)]
        events[0].record()
        for event in events[1:]:
            call()
            event.record()
        torch.cuda.synchronize(device)
        return [start.elapsed_time(end) / 1e3 for start, end in pairwise(events)]
    stamps = [time.perf_counter()]
    for _ in range(iterations):
        call()
        stamps.append(time.perf_counter())
    return [end - start for start, end in pairwise(stamps)]

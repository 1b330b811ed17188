"""Time on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch

WARM_UP = 3


def median_milliseconds(call: Callable[[], object], repeats: int = 10) -> float:
    """Return the median time of a call on the device, between CUDA events, after WARM_UP calls."""
    for _ in range(WARM_UP):
        call()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return median(times)

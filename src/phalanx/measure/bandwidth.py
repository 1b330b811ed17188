"""Bandwidth of a device's memory: a copy and a triad over arrays larger than its caches (STREAM; McCalpin 1995)."""

from __future__ import annotations

import os
from statistics import median
from typing import Any

import torch

from phalanx.measure.timing import seconds_each

AT_LEAST_BYTES = 16 * 2**20
"""Of an array, where no cache is known."""


def cache_bytes(device: torch.device) -> int:
    """The last-level cache that a device's ranks share; 0 where the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    names = os.sysconf_names if hasattr(os, "sysconf_names") else {}
    return max(0, os.sysconf("SC_LEVEL3_CACHE_SIZE")) if "SC_LEVEL3_CACHE_SIZE" in names else 0


def array_bytes(cache: int, ranks: int) -> int:
    """Of each array on one of `ranks` that share a cache: all of them have arrays of twice its size, so that a copy
    goes through four times as much."""
    return max(AT_LEAST_BYTES, 2 * cache // ranks)


def bandwidth(device: torch.device, size_bytes: int, iterations: int) -> list[dict[str, Any]]:
    """A copy (a = b) and a triad (a = b + 3 c) of arrays of so many bytes: median seconds, and bytes per second that
    are read and written, as STREAM counts them: 2 and 3 arrays, not what a cache reads before it writes."""
    a, b, c = (torch.ones(size_bytes // 4, device=device) for _ in range(3))
    calls = {"copy": (2, lambda: a.copy_(b)), "triad": (3, lambda: torch.add(b, c, alpha=3.0, out=a))}
    rows = []
    for what, (arrays, call) in calls.items():
        seconds, moved = median(seconds_each(call, device, iterations)), arrays * a.nbytes
        rows.append({"what": what, "moved_bytes": moved, "seconds": seconds, "bytes_per_second": moved / seconds})
    return rows

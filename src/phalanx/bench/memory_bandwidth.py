"""Memory bandwidth of a device: copy and triad of arrays larger than its caches (STREAM, McCalpin 1995)."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

import torch

from phalanx.bench.timing import time_calls

CPU_SYSFS = Path("/sys/devices/system/cpu")
MIN_ARRAY_BYTES = 16 * 2**20
"""Minimum bytes of an array, used if the cache is unknown or small."""


def cache_bytes(device: torch.device) -> int:
    """Return the bytes of the last-level caches of a GPU, or of all CPUs of this machine; 0 if unknown."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    sizes = {
        (cache / "shared_cpu_list").read_text(): int((cache / "size").read_text().strip().removesuffix("K")) * 2**10
        for cache in CPU_SYSFS.glob("cpu[0-9]*/cache/index3")
    }
    return sum(sizes.values())


def array_bytes(cache: int, ranks: int) -> int:
    """Return the bytes of each array on one of `ranks` ranks that share caches.

    All arrays together are four times as large as the caches (STREAM's own rule).
    """
    return max(MIN_ARRAY_BYTES, 4 * cache // ranks)


def bandwidth(device: torch.device, size_bytes: int, iterations: int) -> list[dict[str, Any]]:
    """Measure a copy (a = b) and a triad (a = b + 3 c) of three fp32 arrays of `size_bytes` each.

    The result has median seconds, and bytes per second read and written as STREAM counts them: 2 and 3 arrays,
    without cache reads before writes.
    """
    a, b, c = (torch.ones(size_bytes // 4, device=device) for _ in range(3))
    calls = {"copy": (2, lambda: a.copy_(b)), "triad": (3, lambda: torch.add(b, c, alpha=3.0, out=a))}
    rows = []
    for name, (arrays, call) in calls.items():
        seconds = median(time_calls(call, device, iterations))
        moved = arrays * a.nbytes
        rows.append({"kernel": name, "moved_bytes": moved, "seconds": seconds, "bytes_per_second": moved / seconds})
    return rows

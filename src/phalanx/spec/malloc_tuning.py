"""Limits on the freed memory that glibc's heap retains. No-op with another C library."""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
M_ARENA_MAX = -8


def tune_malloc(trim_threshold_bytes: int, mmap_threshold_bytes: int, max_arenas: int | None = None) -> None:
    """Limit the free memory and the arenas of glibc's heap.

    The heap retains at most `trim_threshold_bytes` of free memory at its end. Allocations from `mmap_threshold_bytes`
    on lie outside the heap and return to the system when freed. Without `max_arenas`, glibc has eight per core, so that
    threads do not wait.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    mallopt(M_TRIM_THRESHOLD, trim_threshold_bytes)
    mallopt(M_MMAP_THRESHOLD, mmap_threshold_bytes)
    if max_arenas is not None:
        mallopt(M_ARENA_MAX, max_arenas)

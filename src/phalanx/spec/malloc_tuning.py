"""Limits on the freed memory that glibc's heap retains. No-op with another C library."""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
M_ARENA_MAX = -8


def tune_malloc(trim_threshold_bytes: int, mmap_threshold_bytes: int, max_arenas: int | None = None) -> None:
    """Limit the free memory and the arenas of glibc's heap.

    Args:
        trim_threshold_bytes: Maximum bytes of free memory that the heap retains at its end.
        mmap_threshold_bytes: Size from which an allocation is outside the heap, and returned to the system when freed.
        max_arenas: Maximum number of arenas; None for glibc's eight per core, so that threads do not wait.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    mallopt(M_TRIM_THRESHOLD, trim_threshold_bytes)
    mallopt(M_MMAP_THRESHOLD, mmap_threshold_bytes)
    if max_arenas is not None:
        mallopt(M_ARENA_MAX, max_arenas)

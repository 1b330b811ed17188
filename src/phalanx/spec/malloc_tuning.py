"""What glibc's heap keeps of memory that was freed; with another C library nothing happens."""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
M_ARENA_MAX = -8


def tune_malloc(trim_threshold_bytes: int, mmap_threshold_bytes: int, max_arenas: int | None = None) -> None:
    """Keep at most `trim_threshold_bytes` of free memory at the heap's end, and only allocations below
    `mmap_threshold_bytes` in the heap: larger ones come from the system and go back there. At most `max_arenas` arenas:
    by default glibc has eight per core, so that threads do not wait."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    mallopt(M_TRIM_THRESHOLD, trim_threshold_bytes)
    mallopt(M_MMAP_THRESHOLD, mmap_threshold_bytes)
    if max_arenas is not None:
        mallopt(M_ARENA_MAX, max_arenas)

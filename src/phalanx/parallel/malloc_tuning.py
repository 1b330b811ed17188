"""What glibc's heap keeps of memory that was freed; with another C library nothing happens."""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8


def tune_malloc(at_most_bytes: int, pieces_below_bytes: int, heaps: int | None = None) -> None:
    """Keep so much at the heap's end, and only pieces below such a size in it: larger ones come from the system and go
    there again. At most so many `heaps`: by default glibc has eight for each core, for threads not to wait."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    mallopt(M_TRIM_THRESHOLD, at_most_bytes)
    mallopt(M_MMAP_THRESHOLD, pieces_below_bytes)
    if heaps is not None:
        mallopt(M_ARENA_MAX, heaps)

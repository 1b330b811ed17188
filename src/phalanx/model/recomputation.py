"""Products that a kernel computes again in its backward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import local

_thread = local()


@contextmanager
def recomputation() -> Iterator[None]:
    """Mark products as computed again, which do not count as FLOPs (`train.profiling.flop_counter`)."""
    before = is_recomputation()
    _thread.is_active = True
    try:
        yield
    finally:
        _thread.is_active = before


def is_recomputation() -> bool:
    """Return whether the current products are computed again."""
    return getattr(_thread, "is_active", False)

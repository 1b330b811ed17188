"""Products that do not count as FLOPs: those that a kernel computes again, and those of weights without tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import local

_thread = local()


@contextmanager
def uncounted_products() -> Iterator[None]:
    """Mark products that do not count as FLOPs (`train.profiling.flop_counter`)."""
    before = is_uncounted()
    _thread.is_active = True
    try:
        yield
    finally:
        _thread.is_active = before


def is_uncounted() -> bool:
    """Return whether the current products do not count."""
    return getattr(_thread, "is_active", False)

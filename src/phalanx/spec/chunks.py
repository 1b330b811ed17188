"""Division of tensors into chunks of limited size, shared by planner and trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import TypeVar

T = TypeVar("T")


def chunk_by_bytes(items: Iterable[T], limit: int, nbytes: Callable[[T], int] = attrgetter("nbytes")) -> list[list[T]]:
    """Split items into chunks of adjacent items.

    Args:
        items: Items in order.
        limit: Maximum bytes of a chunk; a larger item is a chunk of its own.
        nbytes: Function from an item to its size in bytes.
    """
    chunks: list[list[T]] = []
    size = 0
    for item in items:
        if not chunks or size + nbytes(item) > limit:
            chunks.append([])
            size = 0
        chunks[-1].append(item)
        size += nbytes(item)
    return chunks

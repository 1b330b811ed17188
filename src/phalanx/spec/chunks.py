"""Division of tensors into chunks of limited size, shared by planner and trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import TypeVar

T = TypeVar("T")


def chunk_by_bytes(items: Iterable[T], limit: int, nbytes: Callable[[T], int] = attrgetter("nbytes")) -> list[list[T]]:
    """Split `items` into chunks of adjacent items of at most `limit` bytes.

    `nbytes` returns the size of an item in bytes.
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

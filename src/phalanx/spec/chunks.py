"""Split tensors into chunks of limited size, in the same way in the plan and in the program."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import TypeVar

T = TypeVar("T")


def chunk_by_bytes(items: Iterable[T], limit: int, nbytes: Callable[[T], int] = attrgetter("nbytes")) -> list[list[T]]:
    """Split `items` into chunks of neighbors of at most `limit` bytes; a larger item is a chunk of its own.

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

"""Division of tensors into chunks of limited size, shared by planner and trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import TypeVar

T = TypeVar("T")
CPU_LOSS_LOGITS = 2**20
CUDA_LOSS_LOGITS = 2**26
"""Logits of a chunk of the loss: enough for a GPU, and few enough for a CPU's caches."""


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


def loss_chunk_rows(vocab: int, on_cuda: bool) -> int:
    """Return the number of rows of logits whose loss is computed at once (`parallel.cross_entropy`)."""
    return max(1, (CUDA_LOSS_LOGITS if on_cuda else CPU_LOSS_LOGITS) // vocab)

"""Division of tensors into chunks of limited size, shared by planner and trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import TypeVar

T = TypeVar("T")
LOGITS_CHUNK_BYTES = 2**30
"""Maximum bytes of logits in memory. Each chunk reads and writes the gradient of the head's matrix once more, so chunks
are large."""
PIECE_BYTES = 2**28
"""Size in bytes of the trained rows that ZeRO-1 and 2 step at once, and whose gradients are cast at once."""
CPU_LOSS_LOGITS = 2**20
CUDA_LOSS_LOGITS = 2**26
"""Number of logits in a chunk of the loss: enough for a GPU, and few enough for a CPU's caches."""


def chunk_by_bytes(
    items: Iterable[T], limit: float, nbytes: Callable[[T], int] = attrgetter("nbytes")
) -> list[list[T]]:
    """Split items into chunks of adjacent items.

    A chunk has at most `limit` bytes; a larger item is a chunk of its own.
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


def logits_chunk_rows(tokens: int, columns: int, itemsize: int) -> int:
    """Return the number of tokens whose logits are in memory at once: all, or those of chunks of equal size.

    `columns` is the maximum number of columns of the logits on a rank, `itemsize` the bytes of a logit.
    """
    max_rows = max(1, LOGITS_CHUNK_BYTES // (columns * itemsize))
    num_chunks = max(1, -(-tokens // max_rows))
    return -(-tokens // num_chunks)

"""Division of tensors into chunks of limited size, shared by planner and trainer."""

from __future__ import annotations

LOGITS_CHUNK_BYTES = 2**30
"""Maximum bytes of logits in memory. Each chunk reads and writes the gradient of the head's matrix once more, so chunks
are large."""
CPU_LOSS_LOGITS = 2**20
CUDA_LOSS_LOGITS = 2**26
"""Number of logits in a chunk of the loss: enough for a GPU, and few enough for a CPU's caches."""


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

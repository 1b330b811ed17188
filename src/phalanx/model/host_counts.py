"""Counts of tokens that the host reads from the device, once also where a block is computed twice."""

from __future__ import annotations

from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, cast

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.checkpoint import checkpoint

Counts = list[list[int]]

_saved_counts: ContextVar[list[Counts] | Iterator[Counts] | None] = ContextVar("saved_counts", default=None)
"""In a checkpointed forward pass the list to append to, in its recomputation an iterator over that list."""


def to_host_lists(counts: Tensor, total: int) -> Counts:
    """Return the numbers in the rows of a matrix, [K, n]. Each row adds up to `total` where experts are balanced.

    The host waits for the device, once for all rows. A recomputation under `checkpoint_with_saved_counts` does not: it
    takes the numbers of the forward pass.
    """
    saved = _saved_counts.get()
    if isinstance(saved, Iterator):
        return next(saved)
    lists = read_counts(counts, total)
    if saved is not None:
        saved.append(lists)
    return lists


def read_counts(counts: Tensor, total: int) -> Counts:
    """Return the numbers in the rows of a matrix. In a step that is traced without numbers (`phalanx.verify`) its
    tensors have none, and experts are balanced."""
    if isinstance(counts, FakeTensor):
        quotient, remainder = divmod(total, counts.shape[1])
        balanced = [quotient + (index < remainder) for index in range(counts.shape[1])]
        return [balanced] * len(counts)
    return cast(Counts, counts.tolist())


def checkpoint_with_saved_counts(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a block and drop its activations; the backward pass computes them again with the counts of this call.

    Every call saves its own counts, so any number of micro-batches may be in flight, in any order. Recomputed tokens
    choose the same experts: activation checkpointing requires that shapes do not change.
    """
    saved: list[Counts] = []

    def forward(*args: Any, **kwargs: Any) -> Any:
        token = _saved_counts.set(iter(saved) if saved else saved)
        try:
            return block(*args, **kwargs)
        finally:
            _saved_counts.reset(token)

    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

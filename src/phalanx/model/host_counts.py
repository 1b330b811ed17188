"""Token counts that the host reads from the device, only once for a block that is recomputed."""

from __future__ import annotations

from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, cast

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from phalanx.model.dropout import checkpoint_dropping_alike

Counts = list[list[int]]

_saved_counts: ContextVar[list[Counts] | Iterator[Counts] | None] = ContextVar("saved_counts", default=None)
"""In a checkpointed forward pass, the list that receives the counts. In its recomputation, an iterator over this
list."""


def to_host_lists(counts: Tensor, total: int) -> Counts:
    """Return the rows of an integer matrix [K, n] as lists.

    The host waits for the device, once for all rows. A recomputation under `checkpoint_with_saved_counts` does not
    wait: it uses the counts of the forward pass. A traced step has no values; then each row sums to `total`, as if
    experts were balanced."""
    saved = _saved_counts.get()
    if isinstance(saved, Iterator):
        return next(saved)
    lists = read_counts(counts, total)
    if saved is not None:
        saved.append(lists)
    return lists


def read_counts(counts: Tensor, total: int) -> Counts:
    """Return the rows of an integer matrix as lists.

    In a step that is traced without values (`phalanx.verify`), the counts are those of balanced experts."""
    if isinstance(counts, FakeTensor):
        quotient, remainder = divmod(total, counts.shape[1])
        balanced = [quotient + (index < remainder) for index in range(counts.shape[1])]
        return [balanced] * len(counts)
    return cast(Counts, counts.tolist())


def checkpoint_with_saved_counts(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a block and drop its activations; backward recomputes them with the counts of this call.

    Every call saves its own counts, so any number of micro-batches may be in flight, in any order. Recomputed tokens
    choose the same experts: activation checkpointing requires that shapes do not change."""
    saved: list[Counts] = []

    def forward(*args: Any, **kwargs: Any) -> Any:
        token = _saved_counts.set(iter(saved) if saved else saved)
        try:
            return block(*args, **kwargs)
        finally:
            _saved_counts.reset(token)

    return checkpoint_dropping_alike(forward, *args, **kwargs)

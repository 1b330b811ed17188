"""Chunks of the rows of tensors, whose temporary values are in memory one chunk at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

CPU_CHUNK_ELEMENTS = 2**15
GPU_CHUNK_ELEMENTS = 2**24


def row_chunks(rows: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield views of the same `rows` rows of each tensor, in order; the last chunk may have fewer.

    For elementwise work and sums only: a dry run computes the first chunks and the last, whose products it would miss.
    """
    for start in chunk_starts(len(tensors[0]), rows):
        yield tuple(tensor[start : start + rows] for tensor in tensors)


def cached_rows(*tensors: Tensor, row_ndim: int = 1) -> Iterator[tuple[Tensor, ...]]:
    """Yield views of the same rows of tensors [..., width] of one shape but for the width, in order.

    A row may have `row_ndim` axes. Rows are so few that a CPU's caches have them until they are used again. Kernels of
    a GPU need many at once."""
    elements = CPU_CHUNK_ELEMENTS if tensors[0].device.type == "cpu" else GPU_CHUNK_ELEMENTS
    rows = max(1, elements // tensors[0].shape[-row_ndim:].numel())
    return row_chunks(rows, *(tensor.flatten(0, -1 - row_ndim) for tensor in tensors))


def rows_at_once(*tensors: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """Return chunks of the rows of tensors, as `cached_rows`, or all at once for a compiler."""
    return [tensors] if torch.compiler.is_compiling() else cached_rows(*tensors)


def chunk_starts(total: int, rows: int) -> Sequence[int]:
    """Return the first row of each chunk; `verify.repetition` replaces this function."""
    return range(0, total, rows)

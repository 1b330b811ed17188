"""Positions and documents of the tokens of a micro-batch, as mixers need them.

Shapes: B batch, T tokens, N documents of a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from phalanx.model.rotary import RotaryTable, rotary_table
from phalanx.spec.model import QueryTemperatureSpec, RopeSpec


class Documents(NamedTuple):
    """The documents of a batch. The data loader counts them: counting on the device would block the host."""

    starts: Tensor
    """For each token, [B, T], the index in its row at which its document starts."""
    bounds: Tensor
    """Start of each document in the batch's B x T tokens, and their total number, int32 [N + 1]."""
    host_bounds: Sequence[int]
    """The same numbers on the host."""

    @classmethod
    def whole_rows(cls, rows: int, row_tokens: int, device: torch.device) -> Documents:
        """Return one document per row of a batch of [rows, row_tokens]."""
        starts = torch.zeros(rows, row_tokens, dtype=torch.int32, device=device)
        bounds = torch.arange(rows + 1, dtype=torch.int32, device=device) * row_tokens
        return cls(starts, bounds, range(0, rows * row_tokens + 1, row_tokens))

    @classmethod
    def single_tokens_first(cls, rows: int, row_tokens: int, device: torch.device) -> Documents:
        """Return two documents per row of [rows, row_tokens], of one token and of the others."""
        starts = torch.ones(rows, row_tokens, dtype=torch.int32, device=device)
        starts[:, 0] = 0
        host_bounds = [row * row_tokens + first for row in range(rows) for first in (0, 1)] + [rows * row_tokens]
        return cls(starts, torch.tensor(host_bounds, dtype=torch.int32, device=device), host_bounds)

    def in_chunks(self, chunk: int) -> Documents:
        """Return chunks of `chunk` tokens of each document, from its start on, as documents."""
        positions = torch.arange(self.starts.shape[1], dtype=torch.int32, device=self.starts.device) - self.starts
        starts = self.starts + positions // chunk * chunk
        chunks = [first for start, end in pairwise(self.host_bounds) for first in range(start, end, chunk)]
        host_bounds = [*chunks, self.host_bounds[-1]]
        return Documents(starts, torch.tensor(host_bounds, dtype=torch.int32, device=starts.device), host_bounds)


MaskFunction = Callable[[Documents, torch.dtype, int], Any]
"""Function of documents, the dtype of products, and the width of heads; returns the mask argument of attention."""


class SequenceContext:
    """Rotary tables, factors of queries and masks of a micro-batch. Blocks share them: each is computed once."""

    def __init__(
        self,
        x_BTD: Tensor,
        row_positions_T: Tensor | None,
        documents: Documents | None,
        attention_mask: MaskFunction,
        num_ranks: int = 1,
    ) -> None:
        """Create the context of an input of blocks.

        `row_positions_T` are those of the tokens whose attention is computed on this rank, of the `num_ranks` that
        share each row; None if no block needs positions."""
        self.documents = documents
        self.document_starts = None if documents is None else documents.starts
        dtype = torch.float64 if x_BTD.dtype == torch.float64 else torch.float32
        compute = compute_dtype(x_BTD)

        @cache
        def positions() -> Tensor:
            assert row_positions_T is not None
            return positions_in_document(row_positions_T, documents)

        @cache
        def rotary(rope: RopeSpec, head_dim: int) -> RotaryTable:
            return rotary_table(rope, head_dim, positions(), dtype)

        @cache
        def temperature(spec: QueryTemperatureSpec) -> Tensor:
            return query_temperature(spec, positions(), dtype)

        @cache
        def in_chunks(chunk: int) -> Documents | None:
            assert row_positions_T is not None
            row_tokens = len(row_positions_T) * num_ranks
            if row_tokens <= chunk:
                return documents
            return (documents or Documents.whole_rows(len(x_BTD), row_tokens, x_BTD.device)).in_chunks(chunk)

        @cache
        def mask(head_dim: int, chunk: int | None = None) -> Any:
            visible = documents if chunk is None else in_chunks(chunk)
            return None if visible is None else attention_mask(visible, compute, head_dim)

        self.rotary = rotary
        """Function of the parameters of a rotary embedding and the width of heads."""
        self.temperature = temperature
        """Function of the parameters of a factor of queries that grows with their position."""
        self.mask = mask
        """Function of the width of heads and of the tokens of chunks. Without documents and chunks there is no mask."""


def query_temperature(spec: QueryTemperatureSpec, positions: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the factor of the queries at some positions in their documents, [..., T, 1, 1]."""
    intervals = torch.floor((positions.double() + spec.offset) / spec.interval)
    return (1 + spec.scale * intervals.log1p())[..., None, None].to(dtype)


def positions_in_document(row_positions_T: Tensor, documents: Documents | None) -> Tensor:
    """Return the positions in their documents of the tokens at `row_positions_T` in their rows.

    The shape is [T], or [B, T] where documents start inside rows."""
    return row_positions_T if documents is None else row_positions_T - documents.starts[:, row_positions_T]


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of matrix products with `x`, with or without autocast."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype

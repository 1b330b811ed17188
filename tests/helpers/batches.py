"""Batches as lists, and the documents in them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from phalanx.data.packing import Batch, document_bounds
from phalanx.model.sequence_context import Documents


def batch_rows(batch: Batch) -> list[tuple[list[int], list[int], list[int]]]:
    """Return the rows of a batch: (tokens, targets, document starts)."""
    starts = np.zeros_like(batch.tokens) if batch.document_starts is None else batch.document_starts
    return list(zip(batch.tokens.tolist(), batch.targets.tolist(), starts.tolist(), strict=True))


def locate_documents(starts_BT: Tensor) -> Documents:
    """Return the documents that start where `starts_BT` says, as a model takes them."""
    bounds = document_bounds(starts_BT.numpy())
    return Documents(starts_BT, torch.from_numpy(bounds), bounds.tolist())


def starts_of_lengths(lengths: list[list[int]]) -> Tensor:
    """Return the starts of documents, [B, T], by the lengths of each row's."""
    return torch.tensor([[sum(row[:n]) for n, length in enumerate(row) for _ in range(length)] for row in lengths])

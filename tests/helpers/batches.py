"""Batches as lists."""

from __future__ import annotations

import numpy as np

from phalanx.data.packing import Batch


def batch_rows(batch: Batch) -> list[tuple[list[int], list[int], list[int]]]:
    """The rows of a batch: (tokens, targets, document starts)."""
    starts = np.zeros_like(batch.tokens) if batch.document_starts is None else batch.document_starts
    return list(zip(batch.tokens.tolist(), batch.targets.tolist(), starts.tolist(), strict=True))

"""Packing of documents into rows of equal length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from phalanx.data.joined_tokens import JoinedTokens

IGNORE_INDEX = -100
"""Target of a position without a target; torch's cross_entropy ignores it."""


def pack_rows(
    tokens: np.ndarray | JoinedTokens,
    begins: np.ndarray,
    shifts: np.ndarray,
    first: np.ndarray,
    seq_len: int,
    mask: bool,
) -> Batch:
    """Build rows from a stream of documents that are located elsewhere in `tokens`.

    Document d spans the stream from begins[d] to begins[d + 1], and its stream position p is tokens[p + shifts[d]].
    `begins` is int64 [documents + 1] and ends with the end of the last document; `shifts` is [documents]. `first` is
    the stream position of each row's first token, [B]. With `mask`, the batch has `document_starts` if a row has
    several documents."""
    rows = len(first)
    width = seq_len + 1
    # A piece is the part of one document in one row; the pieces of all rows follow each other, int64 [pieces].
    first_document = np.searchsorted(begins, first, side="right") - 1
    last_document = np.searchsorted(begins, first + width - 1, side="right") - 1
    counts = last_document - first_document + 1
    row = np.repeat(np.arange(rows), counts)
    document = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts - first_document, counts)
    start = np.maximum(begins[document] - first[row], 0)
    length = np.minimum(begins[document + 1] - first[row], width) - start
    positions = np.repeat(shifts[document] + first[row] - row * width, length)
    positions += np.arange(rows * width)
    row_tokens = tokens[positions].reshape(rows, width)
    document_starts = None
    if mask and ((start > 0) & (start < seq_len)).any():
        document_starts = np.repeat(start.astype(np.int32), length).reshape(rows, width)[:, :-1]
    return Batch(row_tokens[:, :-1].astype(np.int64), row_tokens[:, 1:].astype(np.int64), document_starts)


def tokens_ahead(batch: Batch, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens 1 to `count` positions after each token, and the targets of these, int64 [count, B, T].

    Targets after the end of a row, or of the token's document, are -100. Tokens there repeat the row's last."""
    tokens = np.stack([_shift(batch.tokens, distance, "edge") for distance in range(1, count + 1)])
    targets = np.stack([_shift(batch.targets, distance, IGNORE_INDEX) for distance in range(1, count + 1)])
    if batch.document_starts is not None:
        starts = np.stack([_shift(batch.document_starts, distance, "edge") for distance in range(1, count + 1)])
        targets[starts != batch.document_starts] = IGNORE_INDEX
    return tokens, targets


def _shift(values_BT: np.ndarray, distance: int, fill: int | Literal["edge"]) -> np.ndarray:
    """Return values that are `distance` positions later in their row."""
    distance = min(distance, values_BT.shape[1])
    kept = values_BT[:, distance:]
    last = values_BT[:, -1:] if fill == "edge" else np.full_like(values_BT[:, :1], fill)
    return np.concatenate([kept, np.repeat(last, distance, axis=1)], axis=1)


def document_bounds(document_starts: np.ndarray) -> np.ndarray:
    """Return the document boundaries in the B x T tokens of a batch, int32 [N + 1]; the last is B x T.

    `document_starts` is that of `Batch`."""
    (begins,) = (document_starts == np.arange(document_starts.shape[1])).ravel().nonzero()
    return np.append(begins, document_starts.size).astype(np.int32)


@dataclass(frozen=True)
class EpochOrder:
    """Order of one epoch."""

    document_starts: np.ndarray
    """Start of each document in the shuffled stream, int64 [documents + 1]."""
    shifts: np.ndarray
    """Offset from a position in the stream to the position in the file, int64 [documents]."""
    order: np.ndarray
    """Order of the sequences, int64 [sequences]."""


def shuffle_epoch(offsets: np.ndarray, seq_len: int, seed: int, epoch: int) -> EpochOrder:
    """Shuffle the documents and sequences of an epoch; `offsets` are those of `IndexedDataset`."""
    generator = np.random.Generator(np.random.PCG64([seed, epoch]))
    documents = generator.permutation(len(offsets) - 1)
    begins = np.zeros(len(offsets), np.int64)
    np.cumsum(np.diff(offsets)[documents], out=begins[1:])
    order = generator.permutation((int(begins[-1]) - 1) // seq_len)
    return EpochOrder(begins, offsets[:-1][documents] - begins[:-1], order)


@dataclass(frozen=True)
class Batch:
    """Rows of packed tokens with their targets."""

    tokens: np.ndarray
    """Inputs, int64 [B, T]."""
    targets: np.ndarray
    """Next token of each input, int64 [B, T]; -100 if there is none."""
    document_starts: np.ndarray | None
    """For each position, the start of its document in its row, int32 [B, T]; None: plain causal attention."""

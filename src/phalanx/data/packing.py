"""Packing of documents into rows of equal length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import numpy as np

if TYPE_CHECKING:
    from phalanx.data.preference_pairs import PreferencePairs

IGNORE_INDEX = -100
"""Target of a position without a target; torch's cross_entropy ignores it."""
ID_BITS = 21
"""Bits of a token's id in the files of conversations. The bits above have its weight."""
MAX_IDS = 2**ID_BITS
WEIGHT_STEPS = 100
"""Weights of targets are multiples of 1 / 100, which files have as integers; 0 stands for the weight 1."""
MAX_WEIGHT = 10


class TokenArray(Protocol):
    """Tokens that are read by their positions."""

    @property
    def dtype(self) -> np.dtype:
        """Type of the tokens."""

    def take(self, positions: np.ndarray, /) -> np.ndarray:
        """Return the tokens at positions."""


class StreamRows(NamedTuple):
    """Rows of a stream of documents, which are located elsewhere in `tokens`."""

    tokens: TokenArray
    documents: np.ndarray
    """Position of each document's first token in the stream, and the offset from a position in the stream to that in
    `tokens`, int64 [documents, 2]."""
    rows: np.ndarray
    """Position of each row's first token in the stream, its document, and that of the last target, int64 [B, 3]."""


def pack_rows(parts: Sequence[StreamRows], seq_len: int, mask: bool, places: np.ndarray | None = None) -> Batch:
    """Build a batch from the rows of several streams.

    With `mask`, the batch has `document_starts` if a row has several documents. `places` are the rows of the batch to
    which the rows of the parts, one part after the other, belong, [B]; None: in order."""
    width = seq_len + 1
    all_rows = _concatenate([part.rows for part in parts])
    first, first_document, last_document = all_rows.T
    num_rows = len(all_rows)
    # A piece is the part of one document in one row; the pieces of all rows follow each other, int64 [pieces].
    counts = last_document - first_document + 1
    ends = counts.cumsum()
    row = np.arange(num_rows).repeat(counts)
    document = np.arange(len(row)) + (first_document + counts - ends).repeat(counts)
    row_bounds = list(accumulate((len(part.rows) for part in parts), initial=0))
    piece_bounds = [0, *ends[np.array(row_bounds[1:]) - 1].tolist()]
    documents = _concatenate(
        [part.documents.take(document[a:b], axis=0) for part, (a, b) in zip(parts, pairwise(piece_bounds), strict=True)]
    )
    begins, shifts = documents.T
    start = np.maximum(begins - first.take(row), 0)
    # A piece ends where the next one, perhaps of the next row, starts.
    flat_start = start + row * width
    length = np.append(flat_start[1:], num_rows * width) - flat_start
    positions = (shifts + (first - np.arange(num_rows) * width).take(row)).repeat(length)
    positions += np.arange(num_rows * width)
    tokens = _concatenate(
        [
            part.tokens.take(positions[a * width : b * width])
            for part, (a, b) in zip(parts, pairwise(row_bounds), strict=True)
        ]
    ).reshape(num_rows, width)
    document_starts = None
    has_starts = mask and bool(((start > 0) & (start < seq_len)).any())
    if places is not None:
        tokens = tokens.take(places.argsort(), axis=0)
        order = places.take(row).argsort(kind="stable")
        start, length = start.take(order), length.take(order)
    if has_starts:
        document_starts = start.astype(np.int32).repeat(length).reshape(num_rows, width)[:, :-1]
    targets = tokens[:, 1:]
    return Batch(token_ids(tokens[:, :-1]), target_ids(targets), document_starts, weights=target_weights(targets))


def weighted_tokens(ids: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return the tokens of a file, int32: ids of targets with their weight, and ~id of tokens that are inputs only.

    Weights are multiples of 1 / `WEIGHT_STEPS`; those of inputs are 0. A target with the weight 1 is its id."""
    steps = np.where(weights == 1, 0, np.rint(weights * WEIGHT_STEPS)).astype(np.int32)
    return np.where(weights > 0, ids | (steps << ID_BITS), ~ids)


def has_weights(tokens: np.ndarray) -> bool:
    """Return whether a target of tokens of a file has another weight than 1."""
    return tokens.dtype.kind != "u" and bool(tokens.max(initial=0) >= MAX_IDS)


def token_ids(tokens: np.ndarray) -> np.ndarray:
    """Return the ids of tokens of a file (`weighted_tokens`), int64."""
    # Tokens have the type of their file up to here, and are widened once.
    ids = tokens.astype(np.int64)
    return ids if tokens.dtype.kind == "u" else np.where(ids < 0, ~ids, _without_weights(ids))


def target_ids(tokens: np.ndarray) -> np.ndarray:
    """Return the targets of tokens of a file (`weighted_tokens`), int64."""
    ids = tokens.astype(np.int64)
    return ids if tokens.dtype.kind == "u" else np.where(ids < 0, IGNORE_INDEX, _without_weights(ids))


def _without_weights(ids: np.ndarray) -> np.ndarray:
    return ids & (MAX_IDS - 1) if has_weights(ids) else ids


def target_weights(tokens: np.ndarray) -> np.ndarray | None:
    """Return the weights of tokens of a file, fp64, and 0 for inputs; None if all targets have the weight 1."""
    if not has_weights(tokens):
        return None
    steps = tokens >> ID_BITS
    return np.where(tokens < 0, 0, np.where(steps == 0, 1, steps / WEIGHT_STEPS))


def _concatenate(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Concatenate arrays; one array is returned unchanged."""
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


@dataclass(frozen=True)
class DocumentSpan:
    """The part of a document in a row."""

    document: int
    """Number of the document in its dataset, from 0."""
    first: int
    """Its first token in the row, as a position in the document."""
    position: int
    """The position of this token in the row."""
    tokens: int
    """Number of tokens."""


def document_spans(epoch: EpochOrder, offsets: np.ndarray, first: int, seq_len: int) -> list[DocumentSpan]:
    """Return the documents of the inputs of a row, whose first token is `first` in the stream of an epoch.

    `offsets` are those of `IndexedDataset`."""
    begins, shifts = epoch.documents.T
    ends = np.append(begins[1:], offsets[-1] - offsets[0])
    spans = []
    position = 0
    while position < seq_len:
        in_stream = int(np.searchsorted(begins, first + position, side="right")) - 1
        tokens = min(int(ends[in_stream]) - first, seq_len) - position
        in_file = first + position + int(shifts[in_stream])
        if in_file >= offsets[-1]:  # padding
            break
        document = int(np.searchsorted(offsets, in_file, side="right")) - 1
        spans.append(DocumentSpan(document, in_file - int(offsets[document]), position, tokens))
        position += tokens
    return spans


def tokens_ahead(batch: Batch, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens 1 to `count` positions after each token, and the targets of these, int64 [count, B, T].

    Targets after the end of a row, or of the token's document, are -100. Tokens there repeat the row's last."""
    tokens = np.stack([_shift(batch.tokens, distance, "edge") for distance in range(1, count + 1)])
    targets = np.stack([_shift(batch.targets, distance, IGNORE_INDEX) for distance in range(1, count + 1)])
    if batch.document_starts is not None:
        starts = np.stack([_shift(batch.document_starts, distance, "edge") for distance in range(1, count + 1)])
        targets[starts != batch.document_starts] = IGNORE_INDEX
    return tokens, targets


def weights_ahead(weights_BT: np.ndarray, count: int) -> np.ndarray:
    """Return the weights of the targets of `tokens_ahead`, fp64 [count, B, T]."""
    return np.stack([_shift(weights_BT, distance, 0) for distance in range(1, count + 1)])


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


class EpochOrder(NamedTuple):
    """Order of one epoch: its documents and sequences, as in `StreamRows`."""

    documents: np.ndarray
    """The documents in shuffled order, int64 [documents, 2]."""
    rows: np.ndarray
    """The sequences in shuffled order, int64 [sequences, 3]."""


def shuffle_epoch(offsets: np.ndarray, seq_len: int, seed: int, epoch: int) -> EpochOrder:
    """Shuffle the documents and sequences of an epoch; `offsets` are those of `IndexedDataset`."""
    generator = np.random.Generator(np.random.PCG64([seed, epoch]))
    documents = generator.permutation(len(offsets) - 1)
    ends = np.cumsum(np.diff(offsets)[documents])
    begins = np.append(0, ends[:-1])
    order = generator.permutation((int(ends[-1]) - 1) // seq_len)
    # A row ends with the last target, which is the first token of the next row.
    first_documents = np.searchsorted(begins, np.arange(len(order) + 1) * seq_len, side="right") - 1
    rows = np.stack([order * seq_len, first_documents[order], first_documents[order + 1]], axis=1)
    return EpochOrder(np.stack([begins, offsets[:-1][documents] - begins], axis=1), rows)


@dataclass(frozen=True)
class Batch:
    """Rows of packed tokens with their targets."""

    tokens: np.ndarray
    """Inputs, int64 [B, T]."""
    targets: np.ndarray
    """Next token of each input, int64 [B, T]; -100 if there is none."""
    document_starts: np.ndarray | None
    """For each position, the start of its document in its row, int32 [B, T]; None: plain causal attention."""
    sources: np.ndarray | None = None
    """Number of the source of each row in a mixture, int64 [B]."""
    pairs: PreferencePairs | None = None
    """The pairs of answers in the rows, if these are preferences."""
    weights: np.ndarray | None = None
    """Factor of the loss of each target, fp64 [B, T]; None: 1."""

"""Pairs of a chosen and a rejected answer in a batch: the answer that each token belongs to.

The documents 2p and 2p + 1 of a file are the chosen and the rejected answer to one prompt, each after a copy of it.
Both are in one row (`data.whole_documents`), and hence in one micro-batch, which is all that the loss of a pair needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate

import numpy as np

from phalanx.data.indexed_dataset import IndexedDataset
from phalanx.data.packing import StreamRows
from phalanx.data.whole_documents import count_targets, pack_whole
from phalanx.spec.mixture import TooLong

NO_ANSWER = -1


@dataclass(frozen=True)
class PreferencePairs:
    """The pairs in the rows of a batch. Pair p has the answers 2p, which is chosen, and 2p + 1."""

    answer_of_token: np.ndarray
    """Answer whose document has each token, int64 [B, T]; -1 for padding."""
    documents: np.ndarray
    """Document of each answer in its file, int64 [2P]."""
    rows: np.ndarray
    """Row of each pair, int64 [P], ascending."""
    targets_per_pair: float = 1.0
    """Number of targets divided by the number of pairs, in the rows of all ranks in a step of training."""

    def __len__(self) -> int:
        return len(self.rows)

    def of_rows(self, rows: slice) -> PreferencePairs:
        """Return the pairs of consecutive rows."""
        first, last = np.searchsorted(self.rows, [rows.start, min(rows.stop, len(self.answer_of_token))]).tolist()
        answers = self.answer_of_token[rows]
        answers = np.where(answers == NO_ANSWER, NO_ANSWER, answers - 2 * first)
        documents = self.documents[2 * first : 2 * last]
        return PreferencePairs(answers, documents, self.rows[first:last] - rows.start, self.targets_per_pair)

    def without_rows_from(self, row: int) -> PreferencePairs:
        """Return the pairs before a row; tokens from there on belong to none."""
        kept = self.of_rows(slice(0, row))
        answers = np.full_like(self.answer_of_token, NO_ANSWER)
        answers[:row] = kept.answer_of_token
        return replace(kept, answer_of_token=answers)


def locate_pairs(part: StreamRows, offsets: np.ndarray, seq_len: int) -> PreferencePairs:
    """Return the pairs of rows of whole documents; `offsets` are those of their `IndexedDataset`."""
    width = seq_len + 1
    first, first_document, last_document = part.rows.T
    counts = last_document - first_document + 1
    row = np.arange(len(part.rows)).repeat(counts)
    in_stream = np.arange(len(row)) + (first_document + counts - counts.cumsum()).repeat(counts)
    begins, shifts = part.documents.take(in_stream, axis=0).T
    is_padding = begins + shifts >= offsets[-1]
    answer = np.where(is_padding, NO_ANSWER, np.cumsum(~is_padding) - 1)
    flat_begin = begins - first.take(row) + row * width
    lengths = np.diff(flat_begin, append=len(part.rows) * width)
    answer_of_token = answer.repeat(lengths).reshape(len(part.rows), width)[:, :-1]
    documents = np.searchsorted(offsets, (begins + shifts)[~is_padding], side="right") - 1
    return PreferencePairs(answer_of_token, documents, row[~is_padding][::2])


def concat_pairs(parts: Sequence[PreferencePairs]) -> PreferencePairs:
    """Return the pairs of the rows of several batches, one after the other."""
    answers_before = accumulate((2 * len(part) for part in parts), initial=0)
    rows_before = accumulate((len(part.answer_of_token) for part in parts), initial=0)
    answers = [
        np.where(part.answer_of_token == NO_ANSWER, NO_ANSWER, part.answer_of_token + before)
        for part, before in zip(parts, answers_before, strict=False)
    ]
    rows = [part.rows + before for part, before in zip(parts, rows_before, strict=False)]
    documents = np.concatenate([part.documents for part in parts])
    return PreferencePairs(np.concatenate(answers), documents, np.concatenate(rows), parts[0].targets_per_pair)


@lru_cache(maxsize=4)
def count_pairs_and_targets(dataset: IndexedDataset, seq_len: int, too_long: TooLong) -> np.ndarray:
    """Return the number of pairs and of targets of each row of `pack_whole`, int64 [rows, 2]."""
    packed = pack_whole(dataset, seq_len, too_long)
    begins, shifts = packed.documents.T
    starts = begins + shifts
    lengths = np.diff(begins, append=begins[-1])
    lengths[starts >= dataset.offsets[-1]] = 0
    targets = count_targets(dataset.tokens, starts, lengths)
    row = np.searchsorted(packed.rows[:, 0], begins, side="right") - 1
    counts = np.zeros((len(packed.rows), 2), np.int64)
    np.add.at(counts, row, np.stack([lengths > 0, targets], axis=1))
    return counts // (2, 1)

"""Rows of whole documents, for conversations: no row cuts one, and padding fills what is left of a row.

Of preferences, two consecutive documents, with the chosen and the rejected answer, are in one row.
Tokens that are inputs only, such as the words of a user, are in the file as ~id, which is negative; targets may have
weights (`data.packing.weighted_tokens`)."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from phalanx.data.indexed_dataset import IndexedDataset
from phalanx.data.joined_tokens import JoinedTokens
from phalanx.data.packing import EpochOrder
from phalanx.data.pair_metadata import has_preference_pairs
from phalanx.spec.errors import UserError
from phalanx.spec.formatting import plural
from phalanx.spec.mixture import TooLong

PADDING = ~0
"""An input without a target, in a document of its own."""


class PaddedTokens:
    """Tokens of a file, followed by any number of `PADDING`."""

    def __init__(self, tokens: np.ndarray | JoinedTokens) -> None:
        self.tokens = tokens
        self.dtype = tokens.dtype

    def take(self, positions: np.ndarray) -> np.ndarray:
        """Return the tokens at positions."""
        is_padding = positions >= len(self.tokens)
        tokens = self.tokens.take(np.where(is_padding, 0, positions))
        tokens[is_padding] = PADDING
        return tokens


@lru_cache(maxsize=32)
def pack_whole(dataset: IndexedDataset, seq_len: int, too_long: TooLong) -> EpochOrder:
    """Pack the documents of a file, as `pack_documents` does. Raises UserError as it does."""
    num_documents = 2 if has_preference_pairs(dataset) else 1
    return pack_documents(dataset.tokens, dataset.offsets, seq_len, too_long, dataset.prefix, num_documents)


def pack_documents(
    tokens: np.ndarray | JoinedTokens,
    offsets: np.ndarray,
    seq_len: int,
    too_long: TooLong,
    name: str,
    num_documents: int = 1,
) -> EpochOrder:
    """Pack documents into as few rows of `seq_len` tokens and a last target as best-fit decreasing needs.

    `offsets` are those of `IndexedDataset`; the rows are of `PaddedTokens`. `num_documents` consecutive documents, two
    of a preference, are in one row, each truncated to its share of the row. Those of which one has no target in the
    part that fits are left out. Raises UserError about `name` if some are too long and `too_long` is "error", or if
    none is left."""
    width = seq_len + 1
    noun = "conversation" if num_documents == 1 else "preference"
    of_documents = np.diff(offsets)
    lengths = of_documents.reshape(-1, num_documents).sum(1)
    is_long = lengths > width
    if too_long == "error" and is_long.any():
        problem = (
            f"has {plural(int(is_long.sum()), noun)} of {len(lengths):,} with more than {width:,} tokens, "
            f"the longest with {int(lengths.max()):,}"
        )
        fix = 'raise training.seq_len, or set data.too_long = "drop" or "truncate"'
        raise UserError("data.train", name, problem, fix)
    share = width // num_documents
    of_documents = np.where(np.repeat(is_long, num_documents), np.minimum(of_documents, share), of_documents)
    lengths = of_documents.reshape(-1, num_documents).sum(1)
    num_targets = count_targets(tokens, offsets[:-1], of_documents)
    is_kept = num_targets.reshape(-1, num_documents).min(1) > 0
    if too_long == "drop":
        is_kept &= ~is_long
    (kept,) = is_kept.nonzero()
    if not len(kept):
        problem = f"has no {noun} with an answer in its first {share:,} tokens"
        raise UserError("data.train", name, problem, f"raise training.seq_len, or add {noun}s")
    documents = np.arange(len(of_documents)).reshape(-1, num_documents)
    rows = [documents[kept[row]].ravel() for row in best_fit_decreasing(lengths[kept], width)]
    return _lay_out(rows, of_documents, offsets[:-1], len(tokens), width)


def count_targets(tokens: np.ndarray | JoinedTokens, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the number of targets of documents with a start and a length in a file, int64 [documents].

    The first token of a document has nothing before it."""
    targets = np.zeros(len(lengths), np.int64)
    for number, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
        targets[number] = np.count_nonzero(tokens[start + 1 : start + length] >= 0) if length else 0
    return targets


def best_fit_decreasing(lengths: np.ndarray, width: int) -> list[list[int]]:
    """Return the items of each bin of `width`: each item, from the longest on, is in the fullest bin with room for it.

    The number of bins is at most 11/9 of the optimum and 6/9 (Johnson 1974, Dosa 2007). Raises no error for items of
    `width` or less."""
    bins: list[list[int]] = []
    bins_by_room: dict[int, list[int]] = {}
    rooms: list[int] = []
    for item in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[item])
        place = bisect_left(rooms, length)
        if place < len(rooms):
            room = rooms[place]
            number = bins_by_room[room].pop()
            if not bins_by_room[room]:
                del bins_by_room[room], rooms[place]
            bins[number].append(item)
        else:
            room = width
            number = len(bins)
            bins.append([item])
        if left := room - length:
            if left not in bins_by_room:
                insort(rooms, left)
            bins_by_room.setdefault(left, []).append(number)
    return bins


def _lay_out(
    rows: Sequence[np.ndarray], lengths: np.ndarray, starts: np.ndarray, padding: int, width: int
) -> EpochOrder:
    """Return a stream of rows of `width` tokens, each of some documents and perhaps padding.

    Documents have `lengths` and `starts`, of which padding has `padding`, in the tokens of a file."""
    begins: list[int] = []
    shifts: list[int] = []
    first_documents = []
    for number, documents in enumerate(rows):
        first_documents.append(len(begins))
        begin = number * width
        for document in documents.tolist():
            begins.append(begin)
            shifts.append(int(starts[document]) - begin)
            begin += int(lengths[document])
        if begin < (number + 1) * width:
            begins.append(begin)
            shifts.append(padding - begin)
    # The stream ends with padding, so that every document has a next one.
    first_documents.append(len(begins))
    begins.append(len(rows) * width)
    shifts.append(padding - begins[-1])
    first = np.array(first_documents)
    bounds = np.stack([np.arange(len(rows)) * width, first[:-1], first[1:] - 1], axis=1)
    return EpochOrder(np.stack([begins, shifts], axis=1), bounds)


@lru_cache(maxsize=4)
def shuffle_whole(dataset: IndexedDataset, seq_len: int, too_long: TooLong, seed: int, epoch: int) -> EpochOrder:
    """Shuffle the rows of an epoch. All epochs have the same rows, so that they have equally many."""
    packed = pack_whole(dataset, seq_len, too_long)
    order = np.random.Generator(np.random.PCG64([seed, epoch])).permutation(len(packed.rows))
    return EpochOrder(packed.documents, packed.rows[order])

"""Token batches from shuffled, packed and split documents; equal at any number of ranks.

Symbols: B rows of a batch, T tokens of a sequence. An epoch is the sequence of all documents in shuffled order. Its
sequence s has inputs [sT, sT + T) and targets shifted by one. Tokens that do not fill a sequence are dropped.

Why: `docs/design/decisions/global-batches.md`."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator
from dataclasses import replace
from fractions import Fraction
from functools import cached_property
from queue import SimpleQueue
from typing import Any, Protocol

import numpy as np

from phalanx.data.indexed_dataset import IndexedDataset
from phalanx.data.packing import (
    IGNORE_INDEX,
    Batch,
    DocumentSpan,
    EpochOrder,
    StreamRows,
    document_spans,
    pack_rows,
)
from phalanx.data.pair_metadata import has_preference_pairs, has_whole_documents
from phalanx.data.preference_pairs import concat_pairs, count_pairs_and_targets, locate_pairs
from phalanx.data.whole_documents import PaddedTokens, pack_whole, shuffle_whole
from phalanx.spec.errors import UserError
from phalanx.spec.mixture import TooLong

RESUME_FIX = "resume with the data and settings of the checkpoint, or start a new run"


class StepLoader(Protocol):
    """Interface of the loaders of token files, of streams, and of the user's datasets."""

    def step(self, number: int) -> Batch:
        """Return this rank's rows of global step `number`."""

    def state(self, step: int) -> dict[str, Any]:
        """Return the position of the run before step `step`, for a checkpoint."""

    def resume(self, state: dict[str, Any]) -> None:
        """Resume from the state in a checkpoint, perhaps with steps of another size."""

    def skip_steps(self, steps: int) -> None:
        """Skip the sequences of `steps` steps from the position at which the run resumes."""

    def locate(self, step: int, row: int) -> str:
        """Return the name of this rank's row `row` of a step, for errors."""


class SequenceCounter:
    """The rows of a rank in every step, and the number of each step's first sequence.

    Sequence i of step n has the number n * sequences_per_step + i. After a resume with steps of another size, n counts
    from the step of the resume."""

    def __init__(self, sequences_per_step: int, rank: int = 0, ranks: int = 1) -> None:
        self.sequences_per_step = sequences_per_step
        self.rows = rank_rows(sequences_per_step, rank, ranks)
        self._origin = (0, 0)

    def first_sequence(self, step: int) -> int:
        """Return the number of sequences before a step."""
        origin_step, origin_sequence = self._origin
        return origin_sequence + (step - origin_step) * self.sequences_per_step

    def _step_of(self, sequence: int) -> int:
        """Return the step that has a sequence."""
        origin_step, origin_sequence = self._origin
        return origin_step + (sequence - origin_sequence) // self.sequences_per_step

    def locate(self, step: int, row: int) -> str:
        """Return the name of this rank's row `row` of a step, for errors: the row of the global batch."""
        return row_name(step, int(self.rows[row]))

    def resume_at(self, step: int, sequence: int) -> None:
        """Count from a step that starts at a sequence."""
        self._origin = (step, sequence)

    def skip_steps(self, steps: int) -> None:
        """Skip the sequences of `steps` steps from the position at which the run resumes."""
        origin_step, origin_sequence = self._origin
        self._origin = (origin_step, origin_sequence + steps * self.sequences_per_step)


class EpochLoader(SequenceCounter, ABC):
    """Random access to the share of one rank in every global step, over epochs of a known number of sequences.

    The only state is the step number. The epoch of sequence number g is g // sequences_per_epoch."""

    sequences_per_epoch: int

    def __init__(self, sequences_per_step: int, seed: int, rank: int = 0, ranks: int = 1) -> None:
        super().__init__(sequences_per_step, rank, ranks)
        self.seed = seed

    @abstractmethod
    def read_rows(self, epoch: int, indices: np.ndarray) -> Batch:
        """Return sequences of an epoch, by their indices in its order."""

    @property
    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """Values that determine the order of sequences, by name."""

    def step(self, number: int) -> Batch:
        """Return this rank's rows of global step `number`: [sequences_per_step / ranks, T]."""
        return self.read_sequences(self.first_sequence(number) + self.rows)

    def read_sequences(self, numbers: np.ndarray) -> Batch:
        """Return sequences by their ascending numbers, which continue from epoch to epoch."""
        epochs, index = np.divmod(numbers, self.sequences_per_epoch)
        return concat_batches([self.read_rows(int(epoch), index[epochs == epoch]) for epoch in np.unique(epochs)])

    def state(self, step: int) -> dict[str, Any]:
        """Return the position of the run before step `step`, for a checkpoint (JSON-able)."""
        epoch, position = divmod(self.first_sequence(step), self.sequences_per_epoch)
        return {"step": step, "epoch": epoch, "position": position, **self.identity}

    def resume(self, state: dict[str, Any]) -> None:
        """Resume from the state in a checkpoint, after its last sequence, perhaps with steps of another size.

        Raises UserError if the checkpoint has other data, or other lengths or order."""
        check_resumable(self.identity, state)
        self.resume_at(state["step"], state["epoch"] * self.sequences_per_epoch + state["position"])


class TokenLoader(EpochLoader):
    """Rows of a token file: documents in shuffled order, packed and split."""

    def __init__(
        self,
        dataset: IndexedDataset,
        seq_len: int,
        sequences_per_step: int,
        seed: int,
        rank: int = 0,
        ranks: int = 1,
        mask_documents: bool = True,
        too_long: TooLong = "error",
    ) -> None:
        super().__init__(sequences_per_step, seed, rank, ranks)
        self.dataset = dataset
        self.seq_len = seq_len
        self.mask = mask_documents
        self.too_long: TooLong | None = too_long if has_whole_documents(dataset) else None
        """Treatment of long conversations; None for text, which is cut into sequences."""
        self.has_pairs = self.too_long is not None and has_preference_pairs(dataset)
        """True if the documents are pairs of answers."""
        self._tokens = dataset.tokens if self.too_long is None else PaddedTokens(dataset.tokens)
        self.sequences_per_epoch = self._sequences_in_epoch(seq_len)

    def _sequences_in_epoch(self, seq_len: int) -> int:
        """Return the number of sequences of a length in the text, each with a further token as its last target."""
        if self.too_long is None:
            return (self.dataset.size - 1) // seq_len
        return len(pack_whole(self.dataset, seq_len, self.too_long).rows)

    def _epoch(self, epoch: int) -> EpochOrder:
        if self.too_long is None:
            return self.dataset.epoch_order(self.seq_len, self.seed, epoch)
        return shuffle_whole(self.dataset, self.seq_len, self.too_long, self.seed, epoch)

    def steps_of_epochs(self, epochs: Fraction) -> int:
        """Return the number of whole steps in epochs from the beginning of the run."""
        return self._step_of(int(epochs * self.sequences_per_epoch))

    def require_one_sequence(self) -> None:
        """Raise UserError if the text does not fill one sequence."""
        if self.sequences_per_epoch < 1:
            raise too_few_tokens(self.dataset.prefix, self.dataset.size, self.seq_len)

    def read_rows(self, epoch: int, indices: np.ndarray) -> Batch:
        """Return sequences of an epoch, by their indices in its order."""
        part = self._locate_rows(epoch, indices)
        batch = pack_rows([part], self.seq_len, self.mask)
        return replace(batch, pairs=locate_pairs(part, self.dataset.offsets, self.seq_len)) if self.has_pairs else batch

    def step(self, number: int) -> Batch:
        """Return this rank's rows of global step `number`, [sequences_per_step / ranks, T], with their pairs if any."""
        batch = super().step(number)
        if batch.pairs is None or self.too_long is None:
            return batch
        # All ranks know the rows of all.
        parts = self.locate_sequences(self.first_sequence(number) + np.arange(self.sequences_per_step))
        packed_rows = np.concatenate([part.rows[:, 0] for part in parts]) // (self.seq_len + 1)
        counts = count_pairs_and_targets(self.dataset, self.seq_len, self.too_long)[packed_rows]
        num_pairs, num_targets = counts.sum(axis=0).tolist()
        return replace(batch, pairs=replace(batch.pairs, targets_per_pair=num_targets / num_pairs))

    def locate_sequences(self, numbers: np.ndarray) -> list[StreamRows]:
        """Return where sequences lie, by their ascending numbers, for each epoch that has some."""
        first_epoch, last_epoch = (int(number) // self.sequences_per_epoch for number in (numbers[0], numbers[-1]))
        if first_epoch == last_epoch:
            return [self._locate_rows(first_epoch, numbers - first_epoch * self.sequences_per_epoch)]
        epochs, indices = np.divmod(numbers, self.sequences_per_epoch)
        return [self._locate_rows(int(epoch), indices[epochs == epoch]) for epoch in np.unique(epochs)]

    def _locate_rows(self, epoch: int, indices: np.ndarray) -> StreamRows:
        order = self._epoch(epoch)
        return StreamRows(self._tokens, order.documents, order.rows.take(indices, axis=0))

    def sequences(self, step: int) -> list[tuple[TokenLoader, int]]:
        """Return the loader and the number in it of each of this rank's sequences of a step."""
        return [(self, int(number)) for number in self.first_sequence(step) + self.rows]

    def document_spans(self, number: int) -> list[DocumentSpan]:
        """Return the documents of a sequence, whose number continues from epoch to epoch."""
        epoch, index = divmod(number, self.sequences_per_epoch)
        order = self._epoch(epoch)
        return document_spans(order, self.dataset.offsets, int(order.rows[index, 0]), self.seq_len)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Values that determine the order of sequences, by name."""
        return {
            "seed": self.seed,
            "sequence": self.seq_len,
            "sequences_per_step": self.sequences_per_step,
            "fingerprint": self.fingerprint,
        }

    @cached_property
    def fingerprint(self) -> str:
        """Identifier of the text, and of which conversations are read."""
        return self.dataset.fingerprint() + (f" {self.too_long}" if self.too_long else "")

    def resume(self, state: dict[str, Any]) -> None:
        """Resume from the state in a checkpoint, after its last sequence, perhaps with steps of another size.

        With sequences of another length, or the checkpoint of a mixture that read this text too, see `sequences_read`.
        Raises UserError if the checkpoint has other data or another seed."""
        position = self.read_position(state)
        if position is None:
            raise changed_data()
        check_resumable({"seed": self.seed}, state)
        self.resume_at(state["step"], self.sequences_read(*position))

    def sequences_read(self, seq_len: int, sequences: int) -> int:
        """Return how many of this loader's sequences come before the next one, after `sequences` of `seq_len` tokens.

        Other lengths cut the text into other sequences, of which most would have tokens that were read already: with
        another length, a new epoch starts."""
        if seq_len == self.seq_len or not sequences:
            return sequences
        return -(-sequences // self._sequences_in_epoch(seq_len)) * self.sequences_per_epoch

    def read_position(self, state: dict[str, Any], source: str = "") -> tuple[int, int] | None:
        """Return how much a checkpoint has read of this text: length and number of sequences; None if it has not.

        `state` is that of a loader of one text, or of a mixture, where the text of the same `source` comes first."""
        saved = state.get("fingerprint")
        if isinstance(saved, dict):
            names = sorted((name for name in saved if saved[name] == self.fingerprint), key=lambda name: name != source)
            return tuple(state["read"][names[0]]) if names else None
        if saved != self.fingerprint:
            return None
        seq_len = state["sequence"]
        return seq_len, state["epoch"] * self._sequences_in_epoch(seq_len) + state["position"]


def rank_rows(sequences: int, rank: int, ranks: int) -> np.ndarray:
    """Return a rank's rows of a global batch: a contiguous block, int64 [sequences / ranks].

    If the ranks do not divide the rows, the first ranks have one more each."""
    rows_per_rank, remainder = divmod(sequences, ranks)
    start = rank * rows_per_rank + min(rank, remainder)
    return np.arange(start, start + rows_per_rank + (rank < remainder))


def row_name(step: int, row: int) -> str:
    """Return the name of a row of a global batch. Users count steps from 1, as in progress and metrics."""
    return f"row {row} of step {step + 1}"


def too_few_tokens(source: object, tokens: int, seq_len: int) -> UserError:
    """Return the error for a source of `data.train` that does not fill one sequence."""
    problem = f"has {tokens:,} tokens, but a sequence with its target needs {seq_len + 1:,}"
    return UserError("data.train", source, problem, "add text, or lower training.seq_len")


def concat_batches(batches: list[Batch]) -> Batch:
    """Concatenate the rows of several batches."""
    if len(batches) == 1:
        return batches[0]
    document_starts = None
    if any(batch.document_starts is not None for batch in batches):
        document_starts = np.concatenate(
            [np.zeros_like(b.tokens, np.int32) if b.document_starts is None else b.document_starts for b in batches]
        )
    pairs = [batch.pairs for batch in batches if batch.pairs is not None]
    weights = None
    if any(batch.weights is not None for batch in batches):
        weights = np.concatenate([np.ones(b.targets.shape) if b.weights is None else b.weights for b in batches])
    return Batch(
        np.concatenate([b.tokens for b in batches]),
        np.concatenate([b.targets for b in batches]),
        document_starts,
        pairs=concat_pairs(pairs) if pairs else None,
        weights=weights,
    )


def check_resumable(identity: dict[str, Any], state: dict[str, Any]) -> None:
    """Raise UserError for the first value that differs from the checkpoint's.

    `identity` maps names to the values that determine the order of tokens; `state` holds those of the checkpoint. The
    size of steps, `sequences_per_step`, may differ."""
    fields = {
        "seed": "training.seed",
        "sequence": "training.seq_len",
        "dataset": "data.dataset",
        "samples": "data.dataset",
    }
    for name, value in identity.items():
        if state.get(name) == value or name == "sequences_per_step":
            continue
        if name == "recipe":
            problem = "is split into sequences differently than by the version of Phalanx that wrote the checkpoint"
            raise UserError("data", None, problem, "resume with that version, or start a new run")
        if name not in fields:
            raise changed_data()
        problem = f"differs from the checkpoint's value ({state.get(name)!r})"
        raise UserError(fields[name], value, problem, RESUME_FIX)


def changed_data() -> UserError:
    """Return the error for a text that is not the checkpoint's."""
    # A fingerprint means nothing to users.
    problem = "differs from the checkpoint's data: the text, the tokenizer or the held-out part has changed"
    return UserError("data", None, problem, RESUME_FIX)


def evaluation_batches(
    dataset: IndexedDataset,
    seq_len: int,
    sequences_per_batch: int,
    rank: int = 0,
    ranks: int = 1,
    limit_tokens: int = 0,
    mask_documents: bool = True,
    too_long: TooLong = "error",
) -> Iterator[Batch]:
    """Yield batches of this rank with each held-out token once, in order: [sequences_per_batch, T].

    Every token but the first is a target exactly once over all ranks; of conversations, those of answers. All ranks get
    the same number of batches; the remainder of the last ones has targets of -100. `limit_tokens` is the maximum number
    of targets over all ranks, or 0; with conversations, of the rows before the last. Raises UserError if there are no
    held-out tokens."""
    if has_whole_documents(dataset):
        packed = pack_whole(dataset, seq_len, too_long)
        share = (sequences_per_batch, rank, ranks)
        yield from _whole_batches(dataset, packed, seq_len, *share, limit_tokens, mask_documents)
        return
    targets = dataset.size - 1
    targets = min(targets, limit_tokens) if limit_tokens > 0 else targets
    if targets < 1:
        raise UserError("data.held_out", dataset.prefix, "has too few tokens for an evaluation", "add held-out text")
    origin, end = dataset.bounds
    document_offsets = dataset.offsets - origin
    rows_per_round = sequences_per_batch * ranks
    for first_row in range(0, -(-targets // seq_len), rows_per_round):
        rows = first_row + rank * sequences_per_batch + np.arange(sequences_per_batch)
        positions = rows[:, None] * seq_len + np.arange(seq_len + 1)
        clipped_positions = np.minimum(positions, end - 1 - origin)
        row_tokens = dataset.tokens[clipped_positions + origin].astype(np.int64)
        document_starts = None
        if mask_documents:
            document_index = np.searchsorted(document_offsets, clipped_positions[:, :-1], side="right") - 1
            document_starts = np.maximum(document_offsets[document_index] - positions[:, :1], 0).astype(np.int32)
        yield Batch(
            tokens=np.ascontiguousarray(row_tokens[:, :-1]),
            targets=np.where(positions[:, 1:] <= targets, row_tokens[:, 1:], IGNORE_INDEX),
            document_starts=document_starts if document_starts is not None and document_starts.any() else None,
        )


def _whole_batches(
    dataset: IndexedDataset,
    packed: EpochOrder,
    seq_len: int,
    sequences_per_batch: int,
    rank: int,
    ranks: int,
    limit_tokens: int,
    mask_documents: bool,
) -> Iterator[Batch]:
    """Yield the batches of `evaluation_batches` from rows of conversations."""
    tokens = PaddedTokens(dataset.tokens)
    has_pairs = has_preference_pairs(dataset)
    num_targets = 0
    for first_row in range(0, len(packed.rows), sequences_per_batch * ranks):
        if 0 < limit_tokens <= num_targets:
            return
        # Each rank reads the rows of all, and so knows when there are enough targets.
        numbers = first_row + np.arange(sequences_per_batch * ranks)
        rows = packed.rows[np.minimum(numbers, len(packed.rows) - 1)]
        part = StreamRows(tokens, packed.documents, rows)
        batch = pack_rows([part], seq_len, mask_documents)
        batch.targets[numbers >= len(packed.rows)] = IGNORE_INDEX
        num_targets += int(np.count_nonzero(batch.targets != IGNORE_INDEX))
        own = slice(rank * sequences_per_batch, (rank + 1) * sequences_per_batch)
        starts = None if batch.document_starts is None else batch.document_starts[own]
        pairs = None
        if has_pairs:
            num_rows = int(np.count_nonzero(numbers < len(packed.rows)))
            pairs = locate_pairs(part, dataset.offsets, seq_len).without_rows_from(num_rows).of_rows(own)
        yield Batch(batch.tokens[own], batch.targets[own], starts, pairs=pairs)


def prefetch(loader: StepLoader, first_step: int, last_step: int, depth: int = 2) -> Generator[Batch, None, None]:
    """Yield the batches of consecutive steps from a background thread.

    The thread's errors are raised in place of the batch. Closing the generator ends the thread. Only the thread calls
    the loader until then. `last_step` is not included; at most `depth` batches are ready ahead."""
    queue: SimpleQueue[Batch | BaseException] = SimpleQueue()
    free_slots = threading.Semaphore(depth)
    closed = threading.Event()

    def load_batches() -> None:
        try:
            for number in range(first_step, last_step):
                free_slots.acquire()
                if closed.is_set():
                    return
                queue.put(loader.step(number))
        except BaseException as error:
            queue.put(error)

    thread = threading.Thread(target=load_batches, name="phalanx-data", daemon=True)
    thread.start()
    try:
        for _ in range(first_step, last_step):
            item = queue.get()
            free_slots.release()
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        closed.set()
        free_slots.release()
        thread.join()

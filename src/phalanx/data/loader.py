"""Token batches from shuffled, packed and split documents; equal at any number of ranks.

Symbols: B rows of a batch, T tokens of a sequence. An epoch is the sequence of all documents in shuffled order. Its
sequence s has inputs [sT, sT + T) and targets shifted by one. Tokens that do not fill a sequence are dropped.

Why: `docs/design/decisions/global-batches.md`."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator
from functools import cached_property, lru_cache
from queue import SimpleQueue
from typing import Any, Protocol

import numpy as np

from phalanx.data.indexed_dataset import IndexedDataset
from phalanx.data.packing import IGNORE_INDEX, Batch, pack_rows, shuffle_epoch
from phalanx.spec.errors import UserError


class StepLoader(Protocol):
    """Interface of the loaders of token files, of streams, and of the user's datasets."""

    def step(self, number: int) -> Batch:
        """Return this rank's rows of global step `number`."""

    def state(self, step: int) -> dict[str, Any]:
        """Return the position of the run before step `step`, for a checkpoint."""

    def resume(self, state: dict[str, Any], resized: bool = False) -> None:
        """Resume from the state in a checkpoint. The size of steps must be unchanged unless they are `resized`."""

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
        sequence_indices = self.first_sequence(number) + self.rows
        epochs, index = np.divmod(sequence_indices, self.sequences_per_epoch)
        return concat_batches([self.read_rows(int(epoch), index[epochs == epoch]) for epoch in np.unique(epochs)])

    def state(self, step: int) -> dict[str, Any]:
        """Return the position of the run before step `step`, for a checkpoint (JSON-able)."""
        epoch, position = divmod(self.first_sequence(step), self.sequences_per_epoch)
        tokens = self.first_sequence(step) * self.identity["sequence"]
        return {"step": step, "epoch": epoch, "position": position, "tokens": tokens, **self.identity}

    def resume(self, state: dict[str, Any], resized: bool = False) -> None:
        """Resume from the state in a checkpoint, after its last sequence.

        Raises UserError if the checkpoint has other data, or other lengths or order; steps may be `resized`."""
        check_resumable(self.identity, state, resized)
        self.resume_at(state["step"], state["epoch"] * self.sequences_per_epoch + state["position"])


class TokenLoader(EpochLoader):
    """Rows of a token file: documents in shuffled order, packed and split.

    Raises UserError if the data does not fill one sequence."""

    def __init__(
        self,
        dataset: IndexedDataset,
        seq_len: int,
        sequences_per_step: int,
        seed: int,
        rank: int = 0,
        ranks: int = 1,
        mask_documents: bool = True,
    ) -> None:
        super().__init__(sequences_per_step, seed, rank, ranks)
        self.dataset = dataset
        self.seq_len = seq_len
        self.mask = mask_documents
        self.sequences_per_epoch = (dataset.size - 1) // seq_len
        if self.sequences_per_epoch < 1:
            raise too_few_tokens(dataset.prefix, dataset.size, seq_len)
        self._epoch = lru_cache(maxsize=2)(lambda epoch: shuffle_epoch(dataset.offsets, seq_len, seed, epoch))

    def read_rows(self, epoch: int, indices: np.ndarray) -> Batch:
        """Return sequences of an epoch, by their indices in its order."""
        order = self._epoch(epoch)
        first = order.order[indices] * self.seq_len
        return pack_rows(self.dataset.tokens, order.document_starts, order.shifts, first, self.seq_len, self.mask)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Values that determine the order of sequences, by name."""
        return {
            "seed": self.seed,
            "sequence": self.seq_len,
            "sequences_per_step": self.sequences_per_step,
            "fingerprint": self.dataset.fingerprint(),
        }


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
    return Batch(
        np.concatenate([b.tokens for b in batches]), np.concatenate([b.targets for b in batches]), document_starts
    )


def check_resumable(identity: dict[str, Any], state: dict[str, Any], resized: bool = False) -> None:
    """Raise UserError for the first value that differs from the checkpoint's.

    `identity` maps names to the values that determine the order of tokens; `state` holds those of the checkpoint.
    `sequences_per_step` may differ if steps are `resized`."""
    fields = {
        "seed": "training.seed",
        "sequence": "training.seq_len",
        "sequences_per_step": "training.tokens_per_step",
        "dataset": "data.dataset",
        "samples": "data.dataset",
    }
    fix = "resume with the data and settings of the checkpoint, or start a new run"
    for name, value in identity.items():
        if state.get(name) == value or (resized and name == "sequences_per_step"):
            continue
        if name == "recipe":
            problem = "is split into sequences differently than by the version of Phalanx that wrote the checkpoint"
            raise UserError("data", None, problem, "resume with that version, or start a new run")
        # A fingerprint means nothing to users.
        if name not in fields:
            problem = "differs from the checkpoint's data: the text, the tokenizer or the held-out part has changed"
            raise UserError("data", None, problem, fix)
        saved_value = state.get(name)
        unit = " sequences" if name == "sequences_per_step" else ""
        problem = f"differs from the checkpoint's value ({saved_value!r}{unit})"
        raise UserError(fields[name], f"{value}{unit}" if unit else value, problem, fix)


def evaluation_batches(
    dataset: IndexedDataset,
    seq_len: int,
    sequences_per_batch: int,
    rank: int = 0,
    ranks: int = 1,
    limit_tokens: int = 0,
    mask_documents: bool = True,
) -> Iterator[Batch]:
    """Yield batches of this rank with each held-out token once, in order: [sequences_per_batch, T].

    Every token but the first is a target exactly once over all ranks. All ranks get the same number of batches; the
    remainder of the last ones has targets of -100. `limit_tokens` is the maximum number of targets over all ranks, or
    0. Raises UserError if there are no held-out tokens."""
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

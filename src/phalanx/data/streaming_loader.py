"""Loader that tokenizes during training: TokenLoader's interface, forward only, with exact resume.

Every rank reads and tokenizes all text and keeps its own rows, so that global batches are equal at any number of ranks.
Files (or datasets) are shuffled. The documents within a file stay in order, and sequences are not shuffled."""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.data.bad_records import BadRecords
from phalanx.data.loader import SequenceCounter, check_resumable, too_few_tokens
from phalanx.data.object_cache import read_ahead, use_object_cache
from phalanx.data.packing import Batch, StreamRows, pack_rows
from phalanx.data.record_formats import TEXT_KEY
from phalanx.data.source_checks import records_of
from phalanx.data.sources import (
    RECIPE_VERSION,
    BrokenRecord,
    Document,
    SourceFile,
    is_held_out,
    list_source_files,
    read_records,
)
from phalanx.data.tokenize import tokenize_documents
from phalanx.data.tokenizer import Tokenizer
from phalanx.spec.run import DataSpec

CHUNK_CHARACTERS = 250_000
MAX_SAVED_STATES = 64


@dataclass(frozen=True)
class StreamPosition:
    """A position in the stream."""

    epoch: int = 0
    part: int = 0
    """Index in the epoch's order of files."""
    document: int = 0
    """Index of the document among the records of that file, broken ones included."""
    offset: int = 0
    """Index of the token in that document."""
    position: int = 0
    """Number of sequences already taken from this epoch."""


class StreamingLoader(SequenceCounter):
    """Sequential access to the share of one rank in every global step, without held-out documents.

    `data.held_out_fraction` selects the held-out documents. Tokens at an epoch's end that do not fill a sequence are
    dropped. Broken records are skipped up to `data.max_bad_records`, and listed in `bad_records_file` if given. Raises
    UserError if the stream reaches more of them, or all text together does not fill a sequence."""

    def __init__(
        self,
        data: DataSpec,
        tokenizer: Tokenizer,
        seq_len: int,
        sequences_per_step: int,
        seed: int,
        rank: int = 0,
        ranks: int = 1,
        bad_records_file: Path | None = None,
    ) -> None:
        super().__init__(sequences_per_step, rank, ranks)
        self.data = data
        self.tokenizer = tokenizer
        self.seq_len = seq_len
        self.seed = seed
        self._bad_records = BadRecords(data.max_bad_records, file=bad_records_file)
        use_object_cache(data)
        self._source_files = list_source_files(data.train)
        self._states: dict[int, dict[str, Any]] = {}
        self._seek(0, StreamPosition())

    def step(self, number: int) -> Batch:
        """Return this rank's rows of global step `number`: [sequences_per_step / ranks, T].

        Raises ValueError if it is not the next step."""
        if number != self._next_step:
            raise ValueError(
                f"step {number} was requested, but a stream can only return its next step, {self._next_step}"
            )
        local_rows = set(self.rows.tolist())
        sequences = [self._next_sequence(index in local_rows) for index in range(self.sequences_per_step)]
        self._next_step += 1
        self._save_state()
        return _build_batch([row for row in sequences if row is not None], self.seq_len, self.data.mask_documents)

    def state(self, step: int) -> dict[str, Any]:
        """Return the position of the run before step `step`, for a checkpoint (JSON-able).

        Raises ValueError if the stream has not reached the step, or has passed it long ago."""
        if step not in self._states:
            raise ValueError(f"step {step} is not one of the stream's saved steps: {sorted(self._states)}")
        return self._states[step]

    def resume(self, state: dict[str, Any]) -> None:
        """Resume from the state in a checkpoint, without reading earlier files again.

        Raises UserError if the checkpoint has other data, or other lengths or order. Steps may have another size."""
        check_resumable(self._identity, state)
        cursor = StreamPosition(**{name: int(state[name]) for name in StreamPosition.__dataclass_fields__})
        self._seek(int(state["step"]), cursor, int(state["tokens"]))

    def skip_steps(self, steps: int) -> None:
        """Skip the sequences of `steps` steps from the position at which the run resumes."""
        for _ in range(steps * self.sequences_per_step):
            self._next_sequence(False)
        super().skip_steps(steps)
        self._save_state()

    def _seek(self, step: int, cursor: StreamPosition, tokens: int = 0) -> None:
        self.resume_at(step, tokens // self.seq_len)
        self._next_step = step
        self._num_skipped_tokens = cursor.offset
        self._num_taken_sequences = cursor.position
        self._buffer: deque[DocumentPiece] = deque()
        self._num_buffered_tokens = -cursor.offset
        self._epoch_start = cursor
        self._pieces = self._tokenize_documents_from(cursor)
        self._states.clear()
        self._save_state()

    def _save_state(self) -> None:
        position = self._epoch_start
        if self._buffer:
            first_piece = self._buffer[0]
            position = StreamPosition(
                self._epoch_start.epoch,
                first_piece.part,
                first_piece.document,
                self._num_skipped_tokens,
                self._num_taken_sequences,
            )
        tokens = self.first_sequence(self._next_step) * self.seq_len
        self._states[self._next_step] = {"step": self._next_step, **vars(position), "tokens": tokens, **self._identity}
        self._states.pop(self._next_step - MAX_SAVED_STATES, None)

    def _next_sequence(self, is_local: bool) -> list[np.ndarray] | None:
        """Return the next T + 1 tokens of the stream, one array per document; None if not `is_local`."""
        num_tokens = self.seq_len + 1
        while self._num_buffered_tokens < num_tokens:
            piece = next(self._pieces, None)
            if piece is not None:
                self._buffer.append(piece)
                self._num_buffered_tokens += len(piece.ids)
                continue
            if not self._num_taken_sequences:
                raise too_few_tokens(self.data.train, self._num_buffered_tokens, self.seq_len)
            self._epoch_start = StreamPosition(epoch=self._epoch_start.epoch + 1)
            self._buffer.clear()
            self._num_buffered_tokens = self._num_skipped_tokens = self._num_taken_sequences = 0
            self._pieces = self._tokenize_documents_from(self._epoch_start)
        row: list[np.ndarray] | None = None
        if is_local:
            row = []
            start = self._num_skipped_tokens
            for piece in self._buffer:
                row.append(piece.ids[start : start + num_tokens])
                num_tokens -= len(row[-1])
                start = 0
                if not num_tokens:
                    break
        self._num_taken_sequences += 1
        self._num_buffered_tokens -= self.seq_len
        self._num_skipped_tokens += self.seq_len
        # The last target is also the first input of the next sequence, so its document stays in the buffer.
        while self._num_skipped_tokens >= len(self._buffer[0].ids):
            self._num_skipped_tokens -= len(self._buffer.popleft().ids)
        return row

    def _tokenize_documents_from(self, cursor: StreamPosition) -> Iterator[DocumentPiece]:
        """Yield the tokenized documents with end tokens from the cursor to the end of its epoch."""
        order = np.random.Generator(np.random.PCG64([self.seed, cursor.epoch])).permutation(len(self._source_files))
        locations: deque[tuple[int, int]] = deque()

        def iter_documents() -> Iterator[Document]:
            parts = range(cursor.part, len(order))
            stored = [self._source_files[order[part]].stored for part in parts]
            for part, _ in zip(parts, read_ahead(stored, "data.train"), strict=True):
                first_record = cursor.document if part == cursor.part else 0
                file = self._source_files[order[part]]
                records = read_records(file, records_of(self.data), first=first_record)
                for index, record in enumerate(records, first_record):
                    if isinstance(record, BrokenRecord):
                        self._bad_records.add(file.path, record.number, record.error)
                    elif not record.is_empty and not self._is_held_out(record):
                        locations.append((part, index))
                        yield record

        for _, ids in tokenize_documents(iter_documents(), self.tokenizer, CHUNK_CHARACTERS, end=True):
            yield DocumentPiece(*locations.popleft(), ids)

    def _is_held_out(self, document: Document) -> bool:
        return not self.data.has_held_out_text and is_held_out(document.name, self.data.held_out_fraction)

    @cached_property
    def _identity(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "sequence": self.seq_len,
            "sequences_per_step": self.sequences_per_step,
            "recipe": RECIPE_VERSION,
            "fingerprint": _hash_text_sources(self._source_files, self.tokenizer, self.data),
        }


@dataclass(frozen=True)
class DocumentPiece:
    """Tokens of a document in the stream."""

    part: int
    document: int
    ids: np.ndarray
    """Ids of the document and the end token, int32 [tokens]."""


def _build_batch(rows: list[list[np.ndarray]], seq_len: int, mask: bool) -> Batch:
    pieces = [piece for row in rows for piece in row]
    begins = np.cumsum([0, *map(len, pieces[:-1])])
    ends = np.cumsum([len(row) for row in rows])
    first = np.arange(len(rows)) * (seq_len + 1)
    packed = StreamRows(
        np.concatenate(pieces),
        np.stack([begins, np.zeros_like(begins)], axis=1),
        np.stack([first, np.append(0, ends[:-1]), ends - 1], axis=1),
    )
    return pack_rows([packed], seq_len, mask)


def _hash_text_sources(source_files: list[SourceFile], tokenizer: Tokenizer, data: DataSpec) -> str:
    files = [(source_file.name, source_file.size) for source_file in source_files]
    split_by = None if data.has_held_out_text else data.held_out_fraction
    key = json.dumps([files, tokenizer.to_json(), data.text_key or TEXT_KEY, split_by])
    return hashlib.sha256(key.encode("utf-8", "replace")).hexdigest()[:32]

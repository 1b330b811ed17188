"""Tokenization of documents into .bin/.idx pairs.

`tokenizers` encodes a batch in threads of its own without the interpreter's lock, so one process is sufficient for
about ten cores. Reading, encoding and writing overlap, and take under 0.1 us per token in addition to encoding.

Why: `docs/design/decisions/encoding-thread.md`."""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from phalanx.data.indexed_dataset import IndexedWriter, token_dtype
from phalanx.data.packing import weighted_tokens
from phalanx.data.pair_metadata import PAIR_SUFFIXES, write_pair_metadata
from phalanx.data.sources import Document
from phalanx.data.tokenizer import Tokenizer
from phalanx.spec.errors import UserError
from phalanx.spec.mixture import RecordKind

CHUNK_CHARACTERS = 4_000_000
PIECE_CHARACTERS = 1_000_000

# One per process. A pool per generator would be joined when an unfinished generator is collected. The collector may
# run while a thread is being started, whose locks that join needs.
ENCODE_POOL = ThreadPoolExecutor(1, "phalanx-encode")


@dataclass(frozen=True)
class TokenizationCounts:
    """Counts of written text and tokens."""

    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    """Size of the text in UTF-8."""

    def __add__(self, other: TokenizationCounts) -> TokenizationCounts:
        return TokenizationCounts(
            self.documents + other.documents, self.tokens + other.tokens, self.text_bytes + other.text_bytes
        )


Progress = Callable[[TokenizationCounts], None]


def limit_threads(workers: int) -> None:
    """Limit the threads of `tokenizers` (0: one per core).

    The library has no other setting, and reads this one once."""
    if workers > 0:
        os.environ["RAYON_NUM_THREADS"] = str(workers)


def tokenize_documents(
    documents: Iterable[Document], tokenizer: Tokenizer, chunk: int = CHUNK_CHARACTERS, end: bool = False
) -> Iterator[tuple[Document, np.ndarray]]:
    """Yield each document with its ids, int32 [tokens], and the end token with `end`.

    A chat template has its own end. Tokens of conversations are those of `data.packing.weighted_tokens`. A batch of
    `chunk` characters is encoded at once."""
    pending: deque[tuple[list[Document], Future[list[np.ndarray]]]] = deque()
    for group in _group_documents(documents, chunk):
        pending.append((group, ENCODE_POOL.submit(_encode_group, group, tokenizer, end)))
        if len(pending) > 1:
            encoded_group, future = pending.popleft()
            yield from zip(encoded_group, future.result(), strict=True)
    for encoded_group, future in pending:
        yield from zip(encoded_group, future.result(), strict=True)


def write_indexed_pairs(
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    prefixes: Sequence[Path],
    choose: Callable[[Document], int] = lambda document: 0,
    end: bool = True,
    progress: Progress | None = None,
    kind: RecordKind = "text",
) -> list[TokenizationCounts]:
    """Write every document to one of several pairs; return the counts of each pair.

    The documents are those of records of a `kind`. A file next to each pair records tokenizer and kind. After a
    failure, files at the prefixes are unchanged. `choose` returns the index of a document's pair. `progress` gets the
    counts of all pairs after each document. Errors of the file system are raised unchanged (OSError)."""
    dtype = token_dtype(tokenizer.vocab) if kind == "text" else np.dtype(np.int32)
    counts = [TokenizationCounts() for _ in prefixes]
    partial_prefixes = [Path(f"{prefix}.{os.getpid()}.partial") for prefix in prefixes]
    try:
        with ExitStack() as stack:
            writers = [stack.enter_context(IndexedWriter(prefix, dtype)) for prefix in partial_prefixes]
            for document, ids in tokenize_documents(documents, tokenizer, end=end):
                index = choose(document)
                writers[index].add(ids)
                text = document.text
                text_bytes = len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
                counts[index] += TokenizationCounts(1, ids.size, text_bytes)
                if progress is not None:
                    progress(sum(counts, start=TokenizationCounts()))
        for prefix in partial_prefixes:
            write_pair_metadata(prefix, tokenizer, kind)
        for suffix in PAIR_SUFFIXES:
            for partial_prefix, prefix in zip(partial_prefixes, prefixes, strict=True):
                os.replace(f"{partial_prefix}{suffix}", f"{prefix}{suffix}")
    finally:
        for file in (f"{prefix}{suffix}" for prefix in partial_prefixes for suffix in PAIR_SUFFIXES):
            Path(file).unlink(missing_ok=True)
    return counts


def disk_error(field: str, path: str | Path, error: OSError) -> UserError:
    """Return the error for a failed write under `path`, which `field` or option names."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return UserError(field, str(path), "is on a full disk", "free space, or use another disk")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return UserError(field, str(path), "is not writable", "use a writable directory")
    return UserError(field, str(path), f"cannot be used: {error.strerror or error}", "use another directory")


def _group_documents(documents: Iterable[Document], chunk: int) -> Iterator[list[Document]]:
    group: list[Document] = []
    size = 0
    for document in documents:
        group.append(document)
        size += len(document.text) if document.tokens is None else document.tokens.size
        if size >= chunk:
            yield group
            group = []
            size = 0
    if group:
        yield group


def _encode_group(group: Sequence[Document], tokenizer: Tokenizer, end: bool) -> list[np.ndarray]:
    plain = iter(_encode_plain([document for document in group if document.answers is None], tokenizer))
    # Special tokens are tokens in rendered text only.
    answers = {
        is_rendered: iter(_encode_answers(documents, tokenizer, is_rendered))
        for is_rendered in (False, True)
        if (documents := [each for each in group if each.answers is not None and each.is_rendered == is_rendered])
    }
    end_token = np.array([tokenizer.end] if end else [], np.int32)
    encoded = []
    for document in group:
        ids = next(plain if document.answers is None else answers[document.is_rendered])
        encoded.append(ids if document.is_rendered else np.concatenate([ids, end_token]))
    return encoded


def _encode_plain(group: Sequence[Document], tokenizer: Tokenizer) -> list[np.ndarray]:
    pieces = [split_text(document.text) for document in group]
    ids = iter(tokenizer.encode_batch([piece for text_pieces in pieces for piece in text_pieces]))
    encoded = [
        np.concatenate([next(ids) for _ in text_pieces]) if len(text_pieces) > 1 else next(ids)
        for text_pieces in pieces
    ]
    return [
        own if document.tokens is None else _check_tokens(document, tokenizer)
        for document, own in zip(group, encoded, strict=True)
    ]


def _encode_answers(group: Sequence[Document], tokenizer: Tokenizer, is_rendered: bool) -> Iterator[np.ndarray]:
    """Yield the tokens of conversations: those that have no character of an answer have the weight 0."""
    encoded = tokenizer.encode_with_offsets([document.text for document in group], is_rendered)
    for document, (ids, offsets) in zip(group, encoded, strict=True):
        weights = np.zeros(len(ids))
        answers = document.answers or ()
        for (start, stop), weight in zip(answers, document.weights or [1] * len(answers), strict=True):
            weights[(offsets[:, 0] < stop) & (offsets[:, 1] > start)] = weight
        # No token of its document predicts the first one.
        weights[:1] = 0
        yield weighted_tokens(ids, weights)


def _check_tokens(document: Document, tokenizer: Tokenizer) -> np.ndarray:
    """Return the tokens of a document, int32. Raises UserError if one is not an id of the tokenizer."""
    tokens = document.tokens
    if tokens is None or not tokens.size:
        return np.empty(0, np.int32)
    if int(tokens.min()) < 0 or int(tokens.max()) >= tokenizer.vocab:
        invalid_id = int(tokens.min()) if int(tokens.min()) < 0 else int(tokens.max())
        problem = f"has token id {invalid_id}, but the tokenizer only has ids 0 to {tokenizer.vocab - 1}"
        raise UserError("data.train", document.name, problem, "use the tokenizer of these tokens")
    return tokens.astype(np.int32)


def split_text(text: str, size: int = PIECE_CHARACTERS) -> list[str]:
    """Split a long text into pieces of about `size` characters, at the end of a line or else a word.

    One text is encoded by one thread, in a hundred times its size of memory, which is too much for a large corpus."""
    pieces = []
    start = 0
    while len(text) - start > size:
        end = text.rfind("\n", start, start + size) + 1 or text.rfind(" ", start + 1, start + size)
        end = end if end > start else start + size
        pieces.append(text[start:end])
        start = end
    return [*pieces, text[start:]]

"""Facts about text and tokens that a user looks at before training: sizes, lengths, duplicates, broken text, rows."""

from __future__ import annotations

import hashlib
import heapq
import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import numpy as np

from phalanx.data.bad_records import BadRecord, BadRecords
from phalanx.data.indexed_dataset import IndexedDataset
from phalanx.data.loader import TokenLoader
from phalanx.data.object_cache import use_object_cache
from phalanx.data.packing import IGNORE_INDEX, Batch, StreamRows, document_bounds, pack_rows
from phalanx.data.prepare import load_or_train_tokenizer
from phalanx.data.source_checks import TextField, check_tokens, indexed_prefixes, parts_of_mixture, text_fields
from phalanx.data.sources import Document, documents
from phalanx.data.tokenize import Progress, TokenizationCounts, tokenize_documents
from phalanx.data.tokenizer import Tokenizer
from phalanx.data.whole_documents import PaddedTokens, pack_documents
from phalanx.spec.errors import UserError
from phalanx.spec.mixture import RecordKind
from phalanx.spec.run import DataSpec

NUM_LONGEST = 5
NUM_EXAMPLES = 5
REPLACEMENT_CHARACTER = "\ufffd"


@dataclass(frozen=True)
class Bin:
    """Documents with `low` up to, but not including, `high` tokens, or bytes without a tokenizer."""

    low: int
    high: int
    documents: int


@dataclass(frozen=True)
class DocumentPart:
    """Consecutive tokens of a row that attend only to each other, if documents are masked."""

    start: int
    tokens: list[int]
    text: str | None
    """Text of the tokens; None without a tokenizer."""
    trained: list[tuple[bool, str]] | None = None
    """Texts of a conversation that are trained on (True), and those between them; None: all tokens are."""


@dataclass(kw_only=True)
class SourceFacts:
    """Facts about a source, which `CorpusFacts` adds up."""

    name: str
    documents: int = 0
    text_bytes: int | None = None
    """Size of the text in UTF-8; None for tokens."""
    tokens: int | None = None
    """Number of tokens with those that end documents; None without a tokenizer."""
    longest: list[tuple[int, str]] = field(default_factory=list)
    """Length and name of the longest documents."""
    lengths: list[Bin] = field(default_factory=list)
    """Histogram of the lengths of documents, by powers of two."""
    bad_encodings: list[str] = field(default_factory=list)
    """Names of documents that are not UTF-8, or have replacement characters of an earlier conversion."""
    bad_records: list[BadRecord] = field(default_factory=list)
    pair: dict[str, str] | None = None
    """Type and fingerprint of a .bin/.idx pair; None for text."""
    too_long: int | None = None
    """Conversations that are longer than a row; None for text."""
    rows: list[list[DocumentPart]] = field(default_factory=list)
    """Rows as the model sees them, those of text in the order of the text."""


@dataclass(frozen=True)
class Duplicates:
    """Documents with exactly the same content as an earlier one, in whichever source."""

    documents: int
    examples: list[list[str]]
    """Names of equal documents, for those with the most copies."""


class CorpusFacts:
    """Facts about several sources, which are read one after the other, and the documents that several of them have.

    `tokenizer` counts tokens; None: lengths are in bytes. `rows` rows of `seq_len` tokens of each source are among the
    facts, with masked documents as in a run with `mask`."""

    def __init__(self, tokenizer: Tokenizer | None, rows: int, seq_len: int, mask: bool = True) -> None:
        self.tokenizer = tokenizer
        self.num_rows = rows
        self.seq_len = seq_len
        self.mask = mask
        self.sources: list[SourceFacts] = []
        self._digests = array("Q")
        self._names: list[str] = []

    def add_source(self, name: str, field: TextField, progress: Progress = lambda counts: None) -> None:
        """Read a source of text, all of whose broken records are skipped and listed, or of .bin/.idx pairs.

        Raises UserError if it does not exist, or its tokens are of another tokenizer."""
        prefixes = indexed_prefixes(field.sources, field.name)
        for prefix in prefixes:
            self._add_pair(name if len(prefixes) == 1 else prefix, IndexedDataset(prefix, field.name), field.name)
        if not prefixes:
            self._add_text(name, field, progress)

    def _add_text(self, name: str, field: TextField, progress: Progress) -> None:
        bad_records = BadRecords(limit=sys.maxsize)
        is_text = field.records.kind == "text"
        facts = SourceFacts(name=name, too_long=None if is_text or self.tokenizer is None else 0)
        text_bytes = 0
        tokens = 0
        lengths = array("q")
        sample: list[np.ndarray] = []
        sample_size = 0
        # Pairs of answers are one after the other, and in one row.
        unit: list[np.ndarray] = []
        unit_documents = 2 if field.records.kind == "preference" else 1
        text = documents(field.sources, field.records, field.name, bad_records, logs_files=False)
        for document, ids in self._tokenize(text):
            content = document.text.encode("utf-8", "surrogatepass")
            text_bytes += len(content)
            if document.tokens is not None:
                content = document.tokens.astype("<i4").tobytes()
            if ids is not None:
                tokens += len(ids)
                unit.append(ids)
            if len(unit) == unit_documents:
                unit_size = sum(map(len, unit))
                if facts.too_long is not None and unit_size > self.seq_len + 1:
                    facts.too_long += 1
                elif sample_size <= self.num_rows * self.seq_len:
                    sample += unit
                    sample_size += unit_size
                unit = []
            if not document.is_utf8 or REPLACEMENT_CHARACTER in document.text:
                facts.bad_encodings.append(document.name)
            self._add_document(facts, lengths, document.name, len(content) if ids is None else len(ids), content)
            progress(TokenizationCounts(facts.documents, tokens, text_bytes))
        facts.text_bytes = text_bytes
        facts.tokens = None if self.tokenizer is None else tokens
        facts.lengths = histogram(np.frombuffer(lengths, np.int64))
        facts.bad_records = bad_records.list
        if sample:
            pack = _pack_in_order if is_text else partial(_pack_whole, field.records.kind)
            facts.rows = self._describe_rows(pack(sample, self.num_rows, self.seq_len, self.mask))
        self.sources.append(facts)

    def _tokenize(self, text: Iterator[Document]) -> Iterator[tuple[Document, np.ndarray | None]]:
        """Yield each document with its ids and the end token; None without a tokenizer."""
        if self.tokenizer is None:
            yield from ((document, None) for document in text)
            return
        yield from tokenize_documents(text, self.tokenizer, end=True)

    def _add_pair(self, name: str, dataset: IndexedDataset, field: str) -> None:
        if self.tokenizer is not None:
            check_tokens(dataset, self.tokenizer, field)
        pair = {"dtype": str(dataset.tokens.dtype), "fingerprint": dataset.fingerprint()}
        facts = SourceFacts(name=name, tokens=dataset.size, pair=pair)
        lengths = array("q")
        for number in range(len(dataset)):
            ids = dataset.document(number)
            self._add_document(facts, lengths, f"document {number} of {name}", len(ids), ids.astype("<i4").tobytes())
        facts.lengths = histogram(np.frombuffer(lengths, np.int64))
        rows = min(self.num_rows, (dataset.size - 1) // self.seq_len)
        if rows > 0:
            loader = TokenLoader(dataset, self.seq_len, rows, 0, mask_documents=self.mask, too_long="truncate")
            facts.rows = self._describe_rows(loader.step(0))
        self.sources.append(facts)

    def _add_document(self, facts: SourceFacts, lengths: array[int], name: str, length: int, content: bytes) -> None:
        facts.documents += 1
        lengths.append(length)
        heapq.heappush(facts.longest, (length, name))
        if len(facts.longest) > NUM_LONGEST:
            heapq.heappop(facts.longest)
        digest = hashlib.blake2b(content, digest_size=8).digest()
        self._digests.append(int.from_bytes(digest, "little"))
        self._names.append(name)

    def duplicates(self) -> Duplicates:
        """Return the documents whose content, by a hash of 64 bits, an earlier document has."""
        digests = np.frombuffer(self._digests, np.uint64)
        _, inverse, counts = np.unique(digests, return_inverse=True, return_counts=True)
        most_copied = [index for index in np.argsort(-counts, kind="stable")[:NUM_EXAMPLES] if counts[index] > 1]
        examples = [
            [self._names[number] for number in np.flatnonzero(inverse == index)[:NUM_EXAMPLES]] for index in most_copied
        ]
        return Duplicates(int((counts - 1).sum()), examples)

    def _describe_rows(self, batch: Batch | None) -> list[list[DocumentPart]]:
        return [] if batch is None else split_rows(batch, self.tokenizer)


def facts_of_run(data: DataSpec, rows: int, seq_len: int, progress: Progress) -> CorpusFacts:
    """Return facts about each source of a run, with its tokenizer.

    Raises UserError if the run has a dataset of the user, which is code."""
    if data.dataset is not None:
        fix = "remove it for the facts about data.train"
        raise UserError("data.dataset", data.dataset.class_path, "cannot be inspected: its samples are not text", fix)
    use_object_cache(data)
    parts = [part.replace(max_bad_records=sys.maxsize) for part in parts_of_mixture(data) or [data]]
    facts = CorpusFacts(load_or_train_tokenizer(data, parts), rows, seq_len, data.mask_documents)
    fields = text_fields(data)
    # The whole field would not fit into a column of a narrow terminal.
    held_out_names = [field.name.replace("data.held_out_sets.", "held-out ") for field in fields[len(parts) :]]
    names = [*([source.name for source in data.source] or ["data.train"]), *held_out_names]
    for name, text_field in zip(names, fields, strict=True):
        facts.add_source(name, text_field, progress)
    return facts


def histogram(lengths: np.ndarray) -> list[Bin]:
    """Return the documents of each length, from the shortest to the longest, by powers of two."""
    if not len(lengths):
        return []
    exponents = np.frexp(lengths.astype(np.float64))[1]  # 0 for an empty document, else the number of binary digits
    counts = np.bincount(exponents)
    first = int(exponents.min())
    return [
        Bin(2 ** (exponent - 1) if exponent else 0, 2**exponent, int(counts[exponent]))
        for exponent in range(first, len(counts))
    ]


def _pack_in_order(documents: Sequence[np.ndarray], rows: int, seq_len: int, mask: bool) -> Batch | None:
    """Pack documents into rows, in order; None if there are too few tokens for one."""
    rows = min(rows, (sum(map(len, documents)) - 1) // seq_len)
    if rows < 1:
        return None
    begins = np.cumsum([0, *map(len, documents[:-1])])
    first = np.arange(rows + 1) * seq_len
    first_documents = np.searchsorted(begins, first, side="right") - 1
    stream = StreamRows(
        np.concatenate(documents),
        np.stack([begins, np.zeros_like(begins)], axis=1),
        np.stack([first[:-1], first_documents[:-1], first_documents[1:]], axis=1),
    )
    return pack_rows([stream], seq_len, mask)


def _pack_whole(kind: RecordKind, documents: Sequence[np.ndarray], rows: int, seq_len: int, mask: bool) -> Batch | None:
    """Pack conversations or preferences into rows, of which the first are returned; None if no preference is whole."""
    num_documents = 2 if kind == "preference" else 1
    documents = documents[: len(documents) // num_documents * num_documents]
    if not documents:
        return None
    tokens = np.concatenate(documents)
    offsets = np.cumsum([0, *map(len, documents)])
    packed = pack_documents(tokens, offsets, seq_len, "truncate", "SOURCE", num_documents)
    return pack_rows([StreamRows(PaddedTokens(tokens), packed.documents, packed.rows[:rows])], seq_len, mask)


def split_rows(batch: Batch, tokenizer: Tokenizer | None) -> list[list[DocumentPart]]:
    """Return the documents of each row."""
    num_rows, seq_len = batch.tokens.shape
    starts = np.zeros(batch.tokens.shape, np.int32) if batch.document_starts is None else batch.document_starts
    bounds = document_bounds(starts)
    has_answers = bool((batch.targets == IGNORE_INDEX).any())
    rows: list[list[DocumentPart]] = [[] for _ in range(num_rows)]
    for begin, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        tokens = batch.tokens.ravel()[begin:end].tolist()
        text = None if tokenizer is None else tokenizer.decode(tokens)
        # No token of a document predicts its first one.
        is_target = np.append(False, batch.targets.ravel()[begin : end - 1] != IGNORE_INDEX)
        trained = _split_targets(tokens, is_target, tokenizer) if tokenizer is not None and has_answers else None
        rows[begin // seq_len].append(DocumentPart(begin % seq_len, tokens, text, trained))
    return rows


def _split_targets(tokens: Sequence[int], is_target: np.ndarray, tokenizer: Tokenizer) -> list[tuple[bool, str]]:
    """Return the texts of consecutive tokens that are all targets or all not."""
    bounds = [0, *(np.flatnonzero(np.diff(is_target)) + 1).tolist(), len(tokens)]
    return [(bool(is_target[start]), tokenizer.decode_all(tokens[start:end])) for start, end in pairwise(bounds)]

"""Text documents in a fixed order from files, globs, JSON, Parquet, Hugging Face or the Python library."""

from __future__ import annotations

import codecs
import glob
import hashlib
import json
import logging
import os
import sysconfig
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np

from phalanx.data.bad_records import BadRecords, describe_bad_records
from phalanx.data.chat_template import Span
from phalanx.data.compression import COMPRESSED_SUFFIXES, READ_ERRORS, import_extra, open_decompressed
from phalanx.data.folder_listing import select_data_files, walk_visible_files
from phalanx.data.hf_datasets import PREFIX, full_name, is_saved_dataset, parse_hf_source, read_rows
from phalanx.data.mds_shards import (
    PICKLE_ENCODING,
    MdsShard,
    decode_array,
    read_column,
    read_header,
)
from phalanx.data.object_cache import object_cache, read_ahead
from phalanx.data.places import StoredObject, errors_of_store, list_objects, read_object
from phalanx.data.record_formats import RecordFormat, RecordFormatError, RecordText, TextFormat
from phalanx.data.tar_shards import UnsafeMemberError, read_samples
from phalanx.spec.errors import UserError
from phalanx.spec.formatting import plural
from phalanx.spec.local_paths import is_url

logger = logging.getLogger(__name__)

FIELD = "data.train"
TEXT = TextFormat()
RECIPE_VERSION = 6
"""Part of the cache's key. Increase it when the same text would give other documents or tokens."""
ARROW_MAGIC = b"ARROW1"
BINARY_PROBE_BYTES = 8192
Kind = Literal["unknown", "text", "json", "json_lines", "parquet", "arrow", "tar", "mds", "hf"]
JSON_LIKE_CODE = ".cjs .js .jl .jsx .mjs .php .py .pyi .pyw .r .rb .ts .tsx .yaml .yml"
"""Suffixes of languages in which a JSON record is a statement. Such a file is code, never records."""
KIND_OF_SUFFIX: dict[str, Kind] = {
    **dict.fromkeys(JSON_LIKE_CODE.split(), "text"),
    ".json": "json",
    ".jsonl": "json_lines",
    ".jsonlines": "json_lines",
    ".ndjson": "json_lines",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".tar": "tar",
    ".tgz": "tar",
    ".mds": "mds",
}


@dataclass(frozen=True)
class Document:
    """A document with its name."""

    name: str
    """Name that decides whether the document is held out: its file's name, or `file:number` (from 1) for a record."""
    text: str
    is_utf8: bool = True
    """False for a file that is not UTF-8, and is read as Latin-1."""
    tokens: np.ndarray | None = field(default=None, compare=False)
    """Token ids that a file has in place of text; then the text is empty."""
    answers: tuple[Span, ...] | None = None
    """Characters of the text that are trained on; None: all."""
    weights: tuple[float, ...] | None = None
    """Factor of the loss of each answer; None: 1."""
    is_rendered: bool = False
    """True for the text of a chat template, in which special tokens are tokens, and which has its own end."""
    rejected: Document | None = None
    """The document with the rejected answer, if this one has the chosen one."""

    @property
    def is_empty(self) -> bool:
        """True without text and tokens."""
        return not self.text and self.tokens is None


@dataclass(frozen=True)
class BrokenRecord:
    """A record that cannot be read."""

    number: int | None
    """Number of the record as in `BadRecord`."""
    error: UserError


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """A file, or a Hugging Face dataset, which is opened like one."""

    kind: Kind
    path: str
    name: str
    """Path relative to the root of its source, so that it does not depend on the root's location."""
    size: int = 0
    """Bytes of the file or files; 0 for a dataset on the hub."""
    mtime_ns: int = 0
    """Modification time in ns."""
    span: tuple[int, int] | None = None
    """Part to read, from and to: the lines of a JSON lines file that begin at these bytes, or the row groups of a
    Parquet file; None: all. Documents of a part of lines are numbered from the start of the part."""
    is_explicit: bool = False
    """Set for a file that the user named. A file from a directory or glob is skipped if it is binary."""
    stored: StoredObject | None = None
    """The object in a store, whose URL is `path`; None for a local file."""
    copy: str = ""
    """Path of the object's local copy, while the object is read."""

    @property
    def local_path(self) -> str:
        """The path to open; messages name `path`."""
        return self.copy or self.path

    @property
    def content_key(self) -> tuple[str | int, ...]:
        """Values that change with the file or its content, for caches."""
        if self.stored is not None:
            return self.kind, self.path, self.name, self.size, self.stored.version
        location = self.path if self.kind == "hf" else os.path.realpath(self.path)
        return self.kind, location, self.name, self.size, self.mtime_ns


def documents(
    sources: Sequence[str],
    records: RecordFormat = TEXT,
    field: str = FIELD,
    bad_records: BadRecords | None = None,
    logs_files: bool = True,
) -> Iterator[Document]:
    """Yield every non-empty document, source after source, the files of a directory sorted by path.

    Sources are files, directories, globs, "stdlib" or "hf:NAME:CONFIG:SPLIT". `records` says what their records are,
    and `field` (or option) names the sources in errors. Broken records are added to `bad_records`; None: the first one
    is an error. The number of files that a directory or glob stands for is logged at the end. Raises UserError if a
    source is missing or unreadable, too many records are broken, or all documents are empty.
    """
    bad_records = bad_records or BadRecords()
    source_files = list_source_files(sources, field)
    num_read = 0
    for source_file, _ in zip(source_files, read_ahead([file.stored for file in source_files], field), strict=True):
        empty = True
        for document in read_documents(source_file, records, field, bad_records):
            if not document.is_empty:
                empty = False
                yield document
        num_read += not empty
    if not num_read:
        broken = f": {describe_bad_records(bad_records.list)}" if bad_records.found else ""
        fix = "use files that contain text, or the prefixes of .bin/.idx pairs"
        raise UserError(field, list(sources), f"has no text{broken}", fix)
    if logs_files and not all(source_file.is_explicit or source_file.kind == "hf" for source_file in source_files):
        skipped = f", {num_skipped} skipped (binary or empty)" if (num_skipped := len(source_files) - num_read) else ""
        logger.info("%s: %s read%s", field, plural(num_read, "file"), skipped)


def is_held_out(name: str, fraction: float) -> bool:
    """Return whether the document of this name is held out, equally in every run and on every machine."""
    digest = hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest, "little") < fraction * 2**64


def list_source_files(sources: Sequence[str], field: str = FIELD) -> list[SourceFile]:
    """List the files and datasets of `sources`. Raises UserError for one that does not exist."""
    if not sources:
        raise UserError(field, list(sources), "is empty", 'use a file, a directory, a glob or "stdlib"')
    return [source_file for source in sources for source_file in _expand_source(source, field)]


def _expand_source(source: str, field: str) -> list[SourceFile]:
    if source == "stdlib":
        library = sysconfig.get_path("stdlib")
        names = [name for name in walk_visible_files(library) if name.endswith(".py")]
        return [_describe_source_file(os.path.join(library, name), library, field) for name in names]
    if is_url(source):
        objects = {stored.name: stored for stored in list_objects(source, field)}
        is_folder = not glob.has_magic(source) and all(stored.url != source for stored in objects.values())
        names = _select_in_folder(objects, source.rstrip("/"), field) if is_folder else list(objects)
        return [_describe_object(objects[name], source) for name in names]
    if not source.startswith(PREFIX) and is_saved_dataset(os.path.expanduser(source)):
        source = f"{PREFIX}{source}"
    # A dataset on disk has a size and a time. Of a dataset on the hub, only the name is known.
    if source.startswith(PREFIX):
        parts = parse_hf_source(source)
        files = [os.stat(os.path.join(parts.path, name)) for name in walk_visible_files(parts.path)]
        size = sum(file.st_size for file in files)
        changed = max((file.st_mtime_ns for file in files), default=0)
        name = "hf" if os.path.isdir(parts.path) else source
        return [SourceFile(kind="hf", path=full_name(parts), name=name, size=size, mtime_ns=changed)]
    path = os.path.expanduser(source)
    if os.path.isfile(path):
        return [_describe_source_file(path, os.path.dirname(path), field, is_explicit=True)]
    if os.path.isdir(path):
        root = path
        paths = [os.path.join(root, name) for name in _select_in_folder(walk_visible_files(root), root, field)]
    elif glob.has_magic(source):
        components = path.split(os.sep)
        first_wildcard = next(number for number, component in enumerate(components) if glob.has_magic(component))
        root = os.sep.join(components[:first_wildcard]) or (os.sep if path.startswith(os.sep) else os.curdir)
        paths = sorted(match for match in glob.glob(path, recursive=True) if os.path.isfile(match))
    else:
        where = "" if os.path.isabs(path) else f" (relative to the current directory: {os.path.abspath(path)})"
        fix = "correct the path; a glob needs * or ?"
        raise UserError(field, source, f"does not exist{where}", fix)
    if not paths:
        raise UserError(field, source, "matches no file", "correct the path")
    return [_describe_source_file(match, root, field) for match in paths]


def _select_in_folder(names: Iterable[str], root: str, field: str) -> list[str]:
    """Return the names of files with data in a directory or a folder of a store. Raises UserError if there are none."""
    selected = select_data_files(names, root, lambda path: _read_index(path, field), field)
    if not selected:
        fix = "correct the path; hidden files and those that describe others are not read"
        raise UserError(field, root, "is a directory without a readable file", fix)
    return selected


def _read_index(path: str, field: str) -> bytes:
    """Return the content of a small file or object."""
    if is_url(path):
        with errors_of_store(field, path):
            return read_object(path)
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise _unreadable_error(field, path, error) from None


def _describe_source_file(path: str, root: str, field: str, is_explicit: bool = False) -> SourceFile:
    """Describe a file, named relative to `root`.

    A link keeps its own name, because that of its target may be a hash."""
    try:
        status = os.stat(path)
    except OSError as error:
        raise _unreadable_error(field, path, error) from None
    name = os.path.relpath(path, root)
    return SourceFile(
        kind=_kind_of(path),
        path=path,
        name=name,
        size=status.st_size,
        mtime_ns=status.st_mtime_ns,
        is_explicit=is_explicit,
    )


def _describe_object(stored: StoredObject, source: str) -> SourceFile:
    """Describe an object of a source, which may be the object itself."""
    return SourceFile(
        kind=_kind_of(stored.url),
        path=stored.url,
        name=stored.name,
        size=stored.size or 0,
        is_explicit=stored.url == source,
        stored=stored,
    )


def _kind_of(path: str) -> Kind:
    """Return the kind of a file or object, by its suffix."""
    suffixes = [suffix for suffix in map(str.lower, Path(path).suffixes) if suffix not in COMPRESSED_SUFFIXES]
    return KIND_OF_SUFFIX.get(suffixes[-1] if suffixes else "", "unknown")


def read_documents(
    source_file: SourceFile, records: RecordFormat = TEXT, field: str = FIELD, bad_records: BadRecords | None = None
) -> Iterator[Document]:
    """Yield the documents of one file in order, with the empty ones, so that numbers stay stable.

    The one with a rejected answer follows that with the chosen one.

    Broken records are added to `bad_records`, which raises a UserError if there are too many; None: for the first.
    Raises UserError as well if the file cannot be read."""
    bad_records = bad_records or BadRecords()
    for record in read_records(source_file, records, field):
        if isinstance(record, Document):
            yield record
            if record.rejected is not None:
                yield record.rejected
        else:
            bad_records.add(source_file.path, record.number, record.error)


def read_records(
    source_file: SourceFile, records: RecordFormat = TEXT, field: str = FIELD, first: int = 0
) -> Iterator[Document | BrokenRecord]:
    """Yield the records of one file from index `first` on, broken ones as well.

    If the end of the file is damaged, it is one broken record. Raises UserError if the file cannot be opened."""
    readers = {
        "unknown": _read_by_content,
        "text": _read_text,
        "json": _read_json,
        "json_lines": _read_json_lines,
        "parquet": _read_parquet,
        "arrow": _read_arrow,
        "tar": _read_tar,
        "mds": _read_mds,
    }
    if source_file.stored is not None and not source_file.copy:
        with object_cache().reading([source_file.stored], field) as folder:
            copy = str(folder / Path(source_file.stored.name).name)
            yield from read_records(replace(source_file, copy=copy), records, field, first)
        return
    try:
        if source_file.kind == "hf":
            yield from _read_hf(source_file, records, field, first)
        else:
            yield from islice(readers[source_file.kind](source_file, records, field), first, None)
    except READ_ERRORS as error:
        broken = _unreadable_error(field, source_file.path, error)
        # Errors of the file system have a number, those of damaged content have none.
        if getattr(error, "errno", None) is not None:
            raise broken from None
        yield BrokenRecord(None, broken)


def _read_by_content(source_file: SourceFile, records: RecordFormat, field: str) -> Iterator[Document | BrokenRecord]:
    """Read JSON records if at least half of the first lines are records, otherwise text."""
    with open_decompressed(source_file.local_path, field) as file:
        beginning = file.read(BINARY_PROBE_BYTES).removeprefix(codecs.BOM_UTF8).lstrip()
    may_be_json = beginning[:1] in (b"{", b"[")
    lines = [line for line in beginning.splitlines() if line.strip()]
    num_records = sum(records.is_record(_parse_json(line)) for line in lines)
    # All lines must then be records: a comment above them, or a damaged line, would make the file one document.
    if 2 * num_records >= len(lines) and num_records > 1:
        yield from _read_json_lines(source_file, records, field)
    else:
        yield from (_read_json if may_be_json else _read_text)(source_file, records, field)


def _read_text(source_file: SourceFile, records: RecordFormat, field: str) -> Iterator[Document | BrokenRecord]:
    if records.kind != "text":
        if source_file.is_explicit:
            problem = f"has no records, which data.format = {records.kind!r} needs"
            raise UserError(field, source_file.path, problem, "write JSON objects, one per line, or Parquet")
        return
    with open_decompressed(source_file.local_path, field) as file:
        beginning = file.read(BINARY_PROBE_BYTES)
        is_text = b"\0" not in beginning
        raw = beginning + file.read() if is_text else beginning
    if is_text:
        try:
            yield Document(source_file.name, raw.decode("utf-8-sig"))
        except UnicodeDecodeError:
            yield Document(source_file.name, raw.decode("latin-1"), is_utf8=False)
    elif source_file.is_explicit:
        fix = "use text, .jsonl, .json or .parquet files"
        raise UserError(field, source_file.path, "is not text: it contains zero bytes", fix)


def _read_json(source_file: SourceFile, records: RecordFormat, field: str) -> Iterator[Document | BrokenRecord]:
    """Read the records of a file: JSON lines, an array, or one record.

    Other content is text, unless the user named the file and it must be JSON by its suffix or its first two lines."""
    with open_decompressed(source_file.local_path, field) as file:
        rows = list(islice((_parse_json(line) for line in file if line.strip()), 2))
    are_lines = bool(rows) and all(isinstance(row, dict) for row in rows)
    if not are_lines:
        with open_decompressed(source_file.local_path, field) as file:
            content = _parse_json(file.read())
        rows = content if isinstance(content, list) else [content]
    must_be_json = source_file.is_explicit and (source_file.kind == "json" or (are_lines and len(rows) > 1))
    if not must_be_json and not records.is_record(rows[0] if rows else None):
        yield from _read_text(source_file, records, field)
        return
    if are_lines:
        yield from _read_json_lines(source_file, records, field)
        return
    if content is None:
        fix = "write JSON objects, one per line or in an array; for plain text, use another suffix"
        yield BrokenRecord(None, UserError(field, source_file.path, "is not valid JSON", fix))
        return
    for number, row in enumerate(rows, 1):
        yield _record_document(source_file, number, row, records)


def _parse_json(raw: bytes) -> Any:
    """Return a JSON value; None if the text is not JSON."""
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        return None


def _read_json_lines(source_file: SourceFile, records: RecordFormat, field: str) -> Iterator[Document | BrokenRecord]:
    with open_decompressed(source_file.local_path, field) as file:
        for number, line in enumerate(_lines_of_span(file, source_file.span), 1):
            if not line.strip():
                continue
            record = _parse_line(source_file, number, line, records, field)
            if isinstance(record, BrokenRecord) and source_file.span:
                number += _count_lines_before(source_file.local_path, source_file.span[0])
                record = _parse_line(source_file, number, line, records, field)
            yield record


def _parse_line(
    source_file: SourceFile, number: int, line: bytes, records: RecordFormat, field: str
) -> Document | BrokenRecord:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        # Without the decoder's own line number, which counts within this line.
        problem = f"is not valid JSON: {getattr(error, 'msg', error)}"
        fix = "write one JSON object per line"
        return BrokenRecord(number, UserError(field, f"{source_file.path}:{number}", problem, fix))
    return _record_document(source_file, number, row, records)


@lru_cache(maxsize=1)
def _count_lines_before(path: str, position: int) -> int:
    """Return the number of lines that begin before a position of a file."""
    if not position:
        return 0
    with open(path, "rb") as file:
        chunks = iter(lambda: file.read(min(1 << 20, position - 1 - file.tell())), b"")
        return 1 + sum(chunk.count(b"\n") for chunk in chunks)


def _lines_of_span(file: BinaryIO, span: tuple[int, int] | None) -> Iterator[bytes]:
    """Yield the lines of a file that begin in a span of bytes; None: all."""
    if span is None:
        yield from file
        return
    position, end = span
    if position:
        # The line that has the last byte before the span begins before it.
        file.seek(position - 1)
        position += len(file.readline()) - 1
    while position < end and (line := file.readline()):
        position += len(line)
        yield line


def _record_document(source_file: SourceFile, number: int, row: Any, records: RecordFormat) -> Document | BrokenRecord:
    """Return the document of a record, which counts from 1."""
    try:
        read = records.read(row)
    except RecordFormatError as problem:
        return BrokenRecord(number, _record_error(source_file, problem, records, row, number))
    return _document_of_text(f"{source_file.name}:{number}", read)


def _document_of_text(name: str, read: RecordText) -> Document:
    rejected = None if read.rejected is None else _document_of_text(name, read.rejected)
    return Document(
        name,
        read.text,
        answers=read.answers,
        weights=read.weights,
        is_rendered=read.is_rendered,
        rejected=rejected,
    )


def _record_error(
    source_file: SourceFile, problem: RecordFormatError, records: RecordFormat, row: Any, number: int = 1
) -> UserError:
    location = f"{source_file.path}:{number}"
    if records.kind != "text":
        return UserError("data.format", records.kind, str(problem).format(location), problem.fix)
    # The records before it have text, so the field is right.
    fix = "correct or remove this record" if number > 1 and isinstance(row, dict) else problem.fix
    return UserError("data.text_key", records.key, str(problem).format(location), fix)


def _read_parquet(source_file: SourceFile, records: RecordFormat, field: str) -> Iterator[Document | BrokenRecord]:
    parquet = import_extra("pyarrow.parquet", field, source_file.path)
    try:
        file = parquet.ParquetFile(source_file.local_path)
    except ValueError as error:  # includes ArrowInvalid
        problem = f"is not a valid Parquet file: {error}"
        yield BrokenRecord(None, UserError(field, source_file.path, problem, "recreate the file"))
        return
    with file:
        columns = _columns_of(file.schema_arrow, records)
        if not columns:
            _refuse_columns(source_file, file.iter_batches(batch_size=1), records)
        first = 1
        begin, end = source_file.span or (0, file.num_row_groups)
        for group in range(end):
            number = first
            first += file.metadata.row_group(group).num_rows
            if group < begin:
                continue
            try:
                for batch in file.iter_batches(batch_size=1024, row_groups=[group], columns=columns):
                    for row in _rows_of_batch(batch):
                        yield _column_document(source_file, number, row, records, field)
                        number += 1
            except (*READ_ERRORS, ValueError) as error:
                problem = f"has rows {number} to {first - 1} in a damaged row group: {error}"
                yield BrokenRecord(number, UserError(field, source_file.path, problem, "recreate the file"))


def _read_arrow(source_file: SourceFile, records: RecordFormat, field: str) -> Iterator[Document | BrokenRecord]:
    """Read a file of Arrow record batches, as a stream or with a footer."""
    ipc = import_extra("pyarrow.ipc", field, source_file.path)
    number = 1
    with open_decompressed(source_file.local_path, field) as file:
        try:
            has_footer = file.read(len(ARROW_MAGIC)) == ARROW_MAGIC
            file.seek(0)
            batches: Iterator[Any]
            if has_footer:
                reader = ipc.open_file(file)
                batches = map(reader.get_batch, range(reader.num_record_batches))
            else:
                reader = batches = ipc.open_stream(file)
            columns = _columns_of(reader.schema, records)
            if not columns:
                _refuse_columns(source_file, batches, records)
            for batch in batches:
                for row in _rows_of_batch(batch.select(columns)):
                    yield _column_document(source_file, number, row, records, field)
                    number += 1
        except UserError:
            raise
        except ValueError as error:  # includes ArrowInvalid
            problem = f"is damaged after row {number - 1}: {error}" if number > 1 else f"is not an Arrow file: {error}"
            yield BrokenRecord(None, UserError(field, source_file.path, problem, "recreate the file"))


def _read_tar(source_file: SourceFile, records: RecordFormat, field: str) -> Iterator[Document | BrokenRecord]:
    """Read the samples of a WebDataset shard: member KEY.TEXT_KEY, KEY.txt, or field TEXT_KEY of KEY.json.

    Conversations and prompts are in KEY.json."""
    text_extensions = (records.key, "txt") if records.kind == "text" else ()
    with open_decompressed(source_file.local_path, field) as file:
        samples = enumerate(read_samples(file, {*text_extensions, "json"}), 1)
        try:
            for number, (key, members) in samples:
                location = f"{source_file.path}:{number} ({key})"
                content = next((members[name] for name in text_extensions if name in members), None)
                if content is None and "json" in members:
                    yield _record_document(source_file, number, _parse_json(members["json"]), records)
                elif content is None:
                    problem = f"has no text: its members are {', '.join(f'.{name}' for name in members)}"
                    fix = (
                        f"write KEY.txt, or KEY.json with a field {records.key!r}, or set data.text_key to an extension"
                    )
                    if records.kind != "text":
                        fix = f"write KEY.json, each a record of data.format = {records.kind!r}"
                    yield BrokenRecord(number, UserError(field, location, problem, fix))
                else:
                    yield _utf8_document(source_file, number, content, location, field)
        except UnsafeMemberError as error:
            problem = f"has the member {error}, which is neither a file nor a folder"
            raise UserError(field, source_file.path, problem, "write the archive without links and devices") from None
        except tarfile.TarError as error:
            yield BrokenRecord(None, UserError(field, source_file.path, f"is damaged: {error}", "recreate the file"))


def _utf8_document(
    source_file: SourceFile, number: int, content: bytes, location: str, field: str
) -> Document | BrokenRecord:
    try:
        return Document(f"{source_file.name}:{number}", content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        fix = "correct or remove it"
        return BrokenRecord(number, UserError(field, location, f"has text that is not UTF-8: {error}", fix))


def _read_mds(source_file: SourceFile, records: RecordFormat, field: str) -> Iterator[Document | BrokenRecord]:
    """Read the samples of an MDS shard: text of the encodings str, json and bytes, or tokens of ndarray."""
    path = source_file.path
    number = 0
    with open_decompressed(source_file.local_path, field) as file:
        try:
            shard = read_header(file)
            if PICKLE_ENCODING in shard.encodings:
                name = shard.names[shard.encodings.index(PICKLE_ENCODING)]
                problem = f"has the column {name!r} of pickles (encoding {PICKLE_ENCODING!r}), which are code"
                raise UserError(field, path, problem, "write the shards without it, or with the encoding 'json'")
            columns = records.columns(shard.names)
            if not columns:
                _require_record(source_file, _example_row(shard), records)
            key = columns[0]
            encoding = shard.encodings[shard.names.index(key)]
            if records.kind != "text" and (encoding != "json" or len(columns) > 1):
                problem = "has samples of several columns, or of another encoding than json"
                raise UserError(field, path, problem, f"use JSON lines for data.format = {records.kind!r}")
            for number, value in enumerate(read_column(file, shard, key), 1):
                location = f"{path}:{number}"
                if encoding.partition(":")[0] == "ndarray":
                    yield _token_document(source_file, number, value, encoding, field)
                elif encoding == "json":
                    yield _record_document(source_file, number, {key: _parse_json(value)}, records)
                elif encoding in ("str", "bytes"):
                    yield _utf8_document(source_file, number, value, location, field)
                else:
                    problem = f"is a column of encoding {encoding!r} in {path}, which is neither text nor tokens"
                    raise UserError("data.text_key", key, problem, "use a column of str, json, bytes or ndarray")
        except UserError:
            raise
        except ValueError as error:
            after = f" after sample {number}" if number else ""
            yield BrokenRecord(None, UserError(field, path, f"cannot be read{after}: {error}", "recreate the file"))


def _token_document(
    source_file: SourceFile, number: int, value: bytes, encoding: str, field: str
) -> Document | BrokenRecord:
    try:
        return Document(f"{source_file.name}:{number}", "", tokens=decode_array(value, encoding))
    except ValueError as error:
        location = f"{source_file.path}:{number}"
        return BrokenRecord(number, UserError(field, location, f"is not an array: {error}", "correct or remove it"))


def _example_row(shard: MdsShard) -> dict[str, Any]:
    """Return a row with values of the type of each column, for an error about a missing one."""
    texts = ("str", "json", "bytes")
    columns = zip(shard.names, shard.encodings, strict=True)
    return {name: "" if encoding in texts else 0 for name, encoding in columns}


def _refuse_columns(source_file: SourceFile, batches: Iterator[Any], records: RecordFormat) -> None:
    """Raise UserError about columns that do not have the text, unless there are no rows."""
    # The first row has all columns, so that the error names those with text.
    rows = next((batch for batch in batches if batch.num_rows), None)
    if rows is not None:
        _require_record(source_file, rows.slice(0, 1).to_pylist()[0], records)


def _columns_of(schema: Any, records: RecordFormat) -> list[str]:
    """Return the columns of a pyarrow Schema that have the records; none if the text is not a column of text."""
    columns = records.columns(schema.names)
    types = (str(schema.field(name).type).removeprefix("dictionary<values=") for name in columns)
    is_text = records.kind != "text" or all(name.startswith(("string", "large_string")) for name in types)
    return columns if is_text else []


def _require_record(source_file: SourceFile, row: dict[str, Any], records: RecordFormat) -> None:
    """Raise UserError if a row is not of its format."""
    try:
        records.read(row)
    except RecordFormatError as problem:
        raise _record_error(source_file, problem, records, row) from None


def _column_document(
    source_file: SourceFile, number: int, row: dict[str, Any] | UnicodeDecodeError, records: RecordFormat, field: str
) -> Document | BrokenRecord:
    """Return the document of a row of `_rows_of_batch`."""
    if isinstance(row, UnicodeDecodeError):
        problem = f"has text that is not UTF-8: {row}"
        error = UserError(field, f"{source_file.path}:{number}", problem, "correct or remove this row")
        return BrokenRecord(number, error)
    return _record_document(source_file, number, row, records)


def _rows_of_batch(batch: Any) -> Iterator[dict[str, Any] | UnicodeDecodeError]:
    """Yield the rows of a pyarrow RecordBatch; for one with bytes that are not UTF-8, the error."""
    try:
        yield from batch.to_pylist()
    except UnicodeDecodeError:
        for index in range(batch.num_rows):
            try:
                yield batch.slice(index, 1).to_pylist()[0]
            except UnicodeDecodeError as error:
                yield error


def _read_hf(
    source_file: SourceFile, records: RecordFormat, field: str, first: int = 0
) -> Iterator[Document | BrokenRecord]:
    for number, row in enumerate(read_rows(source_file.path, records.columns, field, first), first + 1):
        if number == 1 and not records.columns(list(row)):
            _require_record(source_file, row, records)
        yield _record_document(source_file, number, row, records)


def _unreadable_error(field: str, path: str, error: Exception) -> UserError:
    reason = getattr(error, "strerror", None) or error
    return UserError(field, path, f"cannot be read: {reason}", "check the file and its permissions")

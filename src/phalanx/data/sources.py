"""Text documents in a fixed order from files, globs, JSON, Parquet, Hugging Face or the Python library."""

from __future__ import annotations

import codecs
import glob
import hashlib
import json
import logging
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from phalanx.data.compression import COMPRESSED_SUFFIXES, READ_ERRORS, import_extra, open_decompressed
from phalanx.data.pair_metadata import METADATA_SUFFIX
from phalanx.spec.errors import UserError
from phalanx.spec.formatting import plural

logger = logging.getLogger(__name__)

FIELD = "data.train"
RECIPE_VERSION = 5
"""Part of the cache's key. Increase it when the same text would give other documents or tokens."""
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__"}
BINARY_PROBE_BYTES = 8192
Kind = Literal["unknown", "text", "json", "json_lines", "parquet", "hf"]
JSON_LIKE_CODE = ".cjs .js .jl .jsx .mjs .php .py .pyi .pyw .r .rb .ts .tsx .yaml .yml"
"""Suffixes of languages in which a JSON record is a statement. Such a file is code, never records."""
CONVERSATION_FIELDS = ("messages", "conversations")
KIND_OF_SUFFIX: dict[str, Kind] = {
    **dict.fromkeys(JSON_LIKE_CODE.split(), "text"),
    ".json": "json",
    ".jsonl": "json_lines",
    ".jsonlines": "json_lines",
    ".ndjson": "json_lines",
    ".parquet": "parquet",
}


@dataclass(frozen=True)
class Document:
    """A document with its name."""

    name: str
    """Name that decides whether the document is held out: its file's name, or `file:number` (from 1) for a record."""
    text: str


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
    is_explicit: bool = False
    """Set for a file that the user named. A file from a directory or glob is skipped if it is binary."""


def documents(
    sources: Sequence[str], text_key: str = "text", field: str = FIELD, logs_files: bool = True
) -> Iterator[Document]:
    """Yield every non-empty document, source after source, the files of a directory sorted by path.

    Sources are files, directories, globs, "stdlib" or "hf:NAME"; `text_key` is the field or column with the text of a
    record, and `field` (or option) names the sources in errors. The number of files that a directory or glob stands for
    is logged at the end. Raises UserError if a source is missing or unreadable, a line is not valid, or all documents
    are empty."""
    source_files = list_source_files(sources, field)
    num_read = 0
    for source_file in source_files:
        empty = True
        for document in read_documents(source_file, text_key, field):
            if document.text:
                empty = False
                yield document
        num_read += not empty
    if not num_read:
        fix = "use files that contain text, or the prefixes of .bin/.idx pairs"
        raise UserError(field, list(sources), "has no text", fix)
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
        return [
            _describe_source_file(path, library, field) for path in _list_visible_files(library) if path.endswith(".py")
        ]
    # A dataset on disk has a size and a time. Of a dataset on the hub, only the name is known.
    if source.startswith("hf:"):
        path = os.path.expanduser(source[3:])
        files = [os.stat(file) for file in _list_visible_files(path)]
        size = sum(file.st_size for file in files)
        changed = max((file.st_mtime_ns for file in files), default=0)
        name = "hf" if os.path.isdir(path) else source
        return [SourceFile(kind="hf", path=source[3:], name=name, size=size, mtime_ns=changed)]
    path = os.path.expanduser(source)
    if os.path.isfile(path):
        return [_describe_source_file(path, os.path.dirname(path), field, is_explicit=True)]
    if os.path.isdir(path):
        root = path
        paths = _list_visible_files(path)
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


def _list_visible_files(root: str) -> list[str]:
    paths = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = sorted(name for name in subfolders if name not in SKIPPED_FOLDERS and not name.startswith("."))
        metadata = {name.removesuffix(".idx") + METADATA_SUFFIX for name in files if name.endswith(".idx")}
        visible_files = sorted(name for name in files if not name.startswith(".") and name not in metadata)
        paths += [os.path.join(folder, name) for name in visible_files]
    return paths


def _describe_source_file(path: str, root: str, field: str, is_explicit: bool = False) -> SourceFile:
    """Describe a file, named relative to `root`.

    A link keeps its own name, because that of its target may be a hash."""
    try:
        status = os.stat(path)
    except OSError as error:
        raise _unreadable_error(field, path, error) from None
    suffixes = [suffix for suffix in map(str.lower, Path(path).suffixes) if suffix not in COMPRESSED_SUFFIXES]
    kind = KIND_OF_SUFFIX.get(suffixes[-1] if suffixes else "", "unknown")
    name = os.path.relpath(path, root)
    return SourceFile(
        kind=kind, path=path, name=name, size=status.st_size, mtime_ns=status.st_mtime_ns, is_explicit=is_explicit
    )


def read_documents(source_file: SourceFile, text_key: str = "text", field: str = FIELD) -> Iterator[Document]:
    """Yield the documents of one file in order, with the empty ones, so that numbers stay stable.

    Raises UserError if the file cannot be read, or a line or row has no text under `text_key`."""
    readers = {
        "unknown": _read_by_content,
        "text": _read_text,
        "json": _read_json,
        "json_lines": _read_json_lines,
        "parquet": _read_parquet,
        "hf": _read_hf,
    }
    try:
        yield from readers[source_file.kind](source_file, text_key, field)
    except READ_ERRORS as error:
        raise _unreadable_error(field, source_file.path, error) from None


def _read_by_content(source_file: SourceFile, text_key: str, field: str) -> Iterator[Document]:
    """Read JSON records if at least half of the first lines are records, otherwise text."""
    with open_decompressed(source_file.path, field) as file:
        beginning = file.read(BINARY_PROBE_BYTES).removeprefix(codecs.BOM_UTF8).lstrip()
    may_be_json = beginning[:1] in (b"{", b"[")
    lines = [line for line in beginning.splitlines() if line.strip()]
    num_records = sum(_is_record(_parse_json(line), text_key) for line in lines)
    # All lines must then be records: a comment above them, or a damaged line, would make the file one document.
    if 2 * num_records >= len(lines) and num_records > 1:
        yield from _read_json_lines(source_file, text_key, field)
    else:
        yield from (_read_json if may_be_json else _read_text)(source_file, text_key, field)


def _read_text(source_file: SourceFile, text_key: str, field: str) -> Iterator[Document]:
    with open_decompressed(source_file.path, field) as file:
        beginning = file.read(BINARY_PROBE_BYTES)
        is_text = b"\0" not in beginning
        raw = beginning + file.read() if is_text else beginning
    if is_text:
        yield Document(source_file.name, _decode_text(raw))
    elif source_file.is_explicit:
        fix = "use text, .jsonl, .json or .parquet files"
        raise UserError(field, source_file.path, "is not text: it contains zero bytes", fix)


def _decode_text(raw: bytes) -> str:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        return raw.decode("latin-1")


def _read_json(source_file: SourceFile, text_key: str, field: str) -> Iterator[Document]:
    """Read the records of a file: JSON lines, an array, or one record.

    Other content is text, unless the user named the file and it must be JSON by its suffix or its first two lines."""
    with open_decompressed(source_file.path, field) as file:
        rows = list(islice((_parse_json(line) for line in file if line.strip()), 2))
    are_lines = bool(rows) and all(isinstance(row, dict) for row in rows)
    if not are_lines:
        with open_decompressed(source_file.path, field) as file:
            content = _parse_json(file.read())
        rows = content if isinstance(content, list) else [content]
    must_be_json = source_file.is_explicit and (source_file.kind == "json" or (are_lines and len(rows) > 1))
    if not must_be_json and not _is_record(rows[0] if rows else None, text_key):
        yield from _read_text(source_file, text_key, field)
        return
    if are_lines:
        yield from _read_json_lines(source_file, text_key, field)
        return
    if content is None:
        fix = "write JSON objects, one per line or in an array; for plain text, use another suffix"
        raise UserError(field, source_file.path, "is not valid JSON", fix)
    for number, row in enumerate(rows, 1):
        yield _record_document(source_file, number, row, text_key)


def _is_record(row: Any, text_key: str) -> bool:
    """Return whether a row is a record, possibly without text, and not an object of another kind of file."""
    return isinstance(row, dict) and text_key in row and isinstance(row[text_key], str | None)


def _parse_json(raw: bytes) -> Any:
    """Return a JSON value; None if the text is not JSON."""
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        return None


def _read_json_lines(source_file: SourceFile, text_key: str, field: str) -> Iterator[Document]:
    with open_decompressed(source_file.path, field) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                # Without the decoder's own line number, which counts within this line.
                problem = f"is not valid JSON: {getattr(error, 'msg', error)}"
                fix = "write one JSON object per line"
                raise UserError(field, f"{source_file.path}:{number}", problem, fix) from None
            yield _record_document(source_file, number, row, text_key)


def _record_document(source_file: SourceFile, number: int, row: Any, text_key: str) -> Document:
    """Return the document of a record, which counts from 1."""
    prefix = "hf:" if source_file.kind == "hf" else ""
    location = f"{prefix}{source_file.path}:{number}"
    if not isinstance(row, dict):
        fix = "write JSON objects, one per line or in an array"
        raise UserError("data.text_key", text_key, f"is a field of JSON objects, and {location} is none", fix)
    if text_key not in row:
        fix = _suggest_text(number, row, text_key)
        raise UserError("data.text_key", text_key, f"is not a field of {location}", fix)
    if not isinstance(text := row[text_key], str):
        problem = f"is not a text field: its value in {location} has type {type(text).__name__}"
        raise UserError("data.text_key", text_key, problem, _suggest_text(number, row, text_key))
    return Document(f"{source_file.name}:{number}", text)


def _suggest_text(number: int, row: dict[str, Any], text_key: str) -> str:
    """Return the fix of a record without text. The records before it, if any, have text."""
    if number > 1:
        return "correct or remove this record"
    for name in CONVERSATION_FIELDS:
        if isinstance(row.get(name), list):
            return (
                f"conversations (the list {name!r}) are not read yet: render each to one text field first, as in "
                "docs/guides/recipes.md"
            )
    if text_fields := [name for name, value in row.items() if isinstance(value, str)]:
        return f"use one of its text fields: {', '.join(map(repr, text_fields))}"
    return "correct or remove this record" if text_key in row else f"add a text field {text_key!r} to each record"


def _read_parquet(source_file: SourceFile, text_key: str, field: str) -> Iterator[Document]:
    parquet = import_extra("pyarrow.parquet", field, source_file.path)
    try:
        file = parquet.ParquetFile(source_file.path)
    except ValueError as error:  # includes ArrowInvalid
        problem = f"is not a valid Parquet file: {error}"
        raise UserError(field, source_file.path, problem, "recreate the file") from None
    with file:
        schema = file.schema_arrow
        column_type = str(schema.field(text_key).type) if schema.names.count(text_key) == 1 else ""
        is_text = column_type.removeprefix("dictionary<values=").startswith(("string", "large_string"))
        # The error about a column without text needs all columns, to name those with text.
        columns = [text_key] if is_text else None
        number = 0
        for batch in file.iter_batches(batch_size=1024, columns=columns):
            for row in batch.to_pylist():
                number += 1
                yield _record_document(source_file, number, row, text_key)


def _read_hf(source_file: SourceFile, text_key: str, field: str) -> Iterator[Document]:
    source = f"hf:{source_file.path}"
    datasets = import_extra("datasets", field, source)
    path = os.path.expanduser(source_file.path)
    try:
        if os.path.isdir(path):
            rows = datasets.load_from_disk(path)
            rows = rows["train"] if isinstance(rows, dict) else rows
        else:
            rows = datasets.load_dataset(source_file.path, split="train")
    except Exception as error:  # a hub, a script or a cache may raise anything
        fix = "check the name, and that the dataset has a train split"
        raise UserError(field, source, f"cannot be loaded: {error}", fix) from None
    for number, row in enumerate(rows, 1):
        yield _record_document(source_file, number, row, text_key)


def _unreadable_error(field: str, path: str, error: Exception) -> UserError:
    reason = getattr(error, "strerror", None) or error
    return UserError(field, path, f"cannot be read: {reason}", "check the file and its permissions")

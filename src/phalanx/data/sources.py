"""Text, in a fixed order: files, globs, JSONL, Parquet, Hugging Face datasets, or the Python library."""

from __future__ import annotations

import glob
import hashlib
import importlib
import json
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from phalanx.spec.errors import UserError
from phalanx.spec.extras import missing_package

FIELD = "data.train"
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__"}
BINARY_PROBE_BYTES = 8192
Kind = Literal["text", "jsonl", "parquet", "hf"]


@dataclass(frozen=True)
class Document:
    name: str
    """What it is held out by: its file, and for a line or row of one `file:number` (from 1)."""
    text: str


@dataclass(frozen=True)
class SourceFile:
    """A piece of a corpus that is opened as one: a file, or a Hugging Face dataset."""

    kind: Kind
    path: str
    name: str
    """The path as the user wrote it, or for "stdlib" relative to the library."""
    size: int = 0
    """Bytes of the file or files; 0 for a dataset on the hub."""
    mtime_ns: int = 0
    """When it was changed, in ns."""
    is_explicit: bool = False
    """Whether the user named this very file; one that a directory or glob brought is skipped if binary."""


def documents(sources: Sequence[str], text_key: str = "text", field: str = FIELD) -> Iterator[Document]:
    """Every document with text in it, source after source, the files of a directory sorted by path.

    Raises UserError (under `field`) for a source missing or unreadable, a bad line, or no text at all.
    """
    empty = True
    for source_file in list_source_files(sources, field):
        for document in read_documents(source_file, text_key, field):
            if document.text:
                empty = False
                yield document
    if empty:
        raise UserError(field, list(sources), "has no text", "name files with text in them")


def is_held_out(name: str, fraction: float) -> bool:
    """Whether the document of this name is held out: the same answer in every run and on every machine."""
    digest = hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest, "little") < fraction * 2**64


def list_source_files(sources: Sequence[str], field: str = FIELD) -> list[SourceFile]:
    """The files and datasets that `sources` mean. Raises UserError for one that is not there."""
    if not sources:
        raise UserError(field, list(sources), "names no source", 'name a file, a directory, a glob, or "stdlib"')
    return [source_file for source in sources for source_file in _expand_source(source, field)]


def _expand_source(source: str, field: str) -> list[SourceFile]:
    if source == "stdlib":
        library = sysconfig.get_path("stdlib")
        return [
            _source_file(path, os.path.relpath(path, library), field) for path in _walk(library) if path.endswith(".py")
        ]
    if source.startswith("hf:"):
        return [_hf_source(source)]
    path = os.path.normpath(os.path.expanduser(source))
    if os.path.isfile(path):
        return [_source_file(path, path, field, named=True)]
    if os.path.isdir(path):
        paths = _walk(path)
    elif glob.has_magic(source):
        paths = sorted(match for match in glob.glob(path, recursive=True) if os.path.isfile(match))
    else:
        raise UserError(field, source, "no such file or directory", "check the path; a pattern needs * or ?")
    if not paths:
        raise UserError(field, source, "matches no file", "check the path")
    return [_source_file(match, match, field) for match in paths]


def _hf_source(source: str) -> SourceFile:
    """A dataset on disk changes when one of its files does; of one on the hub only the name is known."""
    files = [os.stat(path) for path in _walk(os.path.expanduser(source[3:]))]
    size, changed = sum(file.st_size for file in files), max((file.st_mtime_ns for file in files), default=0)
    return SourceFile("hf", source[3:], source, size, changed)


def _walk(root: str) -> list[str]:
    paths = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = sorted(name for name in subfolders if name not in SKIPPED_FOLDERS and not name.startswith("."))
        paths += [os.path.join(folder, name) for name in sorted(files) if not name.startswith(".")]
    return paths


def _source_file(path: str, name: str, field: str, named: bool = False) -> SourceFile:
    kind_by_suffix: dict[str, Kind] = {".jsonl": "jsonl", ".parquet": "parquet"}
    try:
        status = os.stat(path)
    except OSError as error:
        raise _unreadable_error(field, path, error) from None
    kind = kind_by_suffix.get(Path(path).suffix, "text")
    return SourceFile(kind, path, name, status.st_size, status.st_mtime_ns, named)


def read_documents(source_file: SourceFile, text_key: str = "text", field: str = FIELD) -> Iterator[Document]:
    """The documents of one part, in its order; the empty ones too, so that their numbers stay.

    Raises UserError if it cannot be read, or a line or row has no text under `text_key`.
    """
    readers = {"text": _read_text, "jsonl": _read_jsonl, "parquet": _read_parquet, "hf": _read_hf}
    try:
        yield from readers[source_file.kind](source_file, text_key, field)
    except OSError as error:
        raise _unreadable_error(field, source_file.path, error) from None


def _read_text(source_file: SourceFile, text_key: str, field: str) -> Iterator[Document]:
    raw = Path(source_file.path).read_bytes()
    if b"\0" in raw[:BINARY_PROBE_BYTES]:
        if source_file.is_explicit:
            raise UserError(
                field, source_file.path, "is not text: it has zero bytes", "name text, .jsonl or .parquet files"
            )
        return
    yield Document(source_file.name, _decode(raw))


def _decode(raw: bytes) -> str:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        return raw.decode("latin-1")


def _read_jsonl(source_file: SourceFile, text_key: str, field: str) -> Iterator[Document]:
    with open(source_file.path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                location = f"{source_file.path}:{number}"
                raise UserError(field, location, f"is not JSON: {error}", "give one JSON object per line") from None
            yield Document(f"{source_file.name}:{number}", _text_field(row, text_key, f"{source_file.path}:{number}"))


def _text_field(row: Any, text_key: str, location: str) -> str:
    if not isinstance(row, dict):
        raise UserError("data.text_key", text_key, f"{location} is not a JSON object", "give one JSON object per line")
    if text_key not in row:
        known = ", ".join(map(repr, row)) or "none"
        raise UserError("data.text_key", text_key, f"is not a field of {location}", f"use one of its fields: {known}")
    if not isinstance(text := row[text_key], str):
        raise UserError(
            "data.text_key", text_key, f"of {location} is {type(text).__name__}, not text", "name a text field"
        )
    return text


def _read_parquet(source_file: SourceFile, text_key: str, field: str) -> Iterator[Document]:
    parquet = _import_extra("pyarrow.parquet", field, source_file.path)
    try:
        file = parquet.ParquetFile(source_file.path)
    except ValueError as error:  # ArrowInvalid is one
        raise UserError(field, source_file.path, f"is not Parquet: {error}", "write the file again") from None
    with file:
        names = file.schema_arrow.names
        if text_key not in names:
            known = ", ".join(map(repr, names))
            raise UserError("data.text_key", text_key, f"is not a column of {source_file.path}", f"use one of: {known}")
        number = 0
        for batch in file.iter_batches(batch_size=1024, columns=[text_key]):
            for text in batch.column(0).to_pylist():
                number += 1
                yield Document(
                    f"{source_file.name}:{number}",
                    _text_field({text_key: text}, text_key, f"{source_file.path}:{number}"),
                )


def _read_hf(source_file: SourceFile, text_key: str, field: str) -> Iterator[Document]:
    datasets = _import_extra("datasets", field, source_file.name)
    path = os.path.expanduser(source_file.path)
    try:
        if os.path.isdir(path):
            rows = datasets.load_from_disk(path)
            rows = rows["train"] if isinstance(rows, dict) else rows
        else:
            rows = datasets.load_dataset(source_file.path, split="train")
    except Exception as error:  # whatever a hub, a script or a cache may raise
        raise UserError(
            field, source_file.name, f"cannot be loaded: {error}", "check the name, and that it has a train split"
        ) from None
    for number, row in enumerate(rows, 1):
        yield Document(f"{source_file.name}:{number}", _text_field(row, text_key, f"{source_file.name}:{number}"))


def _import_extra(module: str, field: str, source: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise missing_package(field, source, module.partition(".")[0]) from None


def _unreadable_error(field: str, path: str, error: OSError) -> UserError:
    return UserError(field, path, f"cannot be read: {error.strerror or error}", "check the path and its permissions")

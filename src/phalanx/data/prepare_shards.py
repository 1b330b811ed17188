"""Tokenization of text in several processes and on several nodes, which continues after a kill.

The text is divided into shards, whatever the number of processes: consecutive files, and parts of large ones.
PREFIX.shards/ has a pair for each, and a file that says that it is complete. The last node to finish joins them into
PREFIX.bin and PREFIX.idx, which are those of one process byte for byte."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.data.bad_records import BAD_RECORDS_SUFFIX, BadRecord, BadRecords, write_bad_records
from phalanx.data.compression import import_extra, is_compressed
from phalanx.data.indexed_dataset import IndexedDataset, write_index
from phalanx.data.pair_metadata import PAIR_SUFFIXES, write_pair_metadata
from phalanx.data.record_formats import RecordFormat
from phalanx.data.sources import RECIPE_VERSION, TEXT, Document, SourceFile, list_source_files, read_documents
from phalanx.data.tokenize import TokenizationCounts, limit_threads, write_indexed_pairs
from phalanx.data.tokenizer import Tokenizer, load_tokenizer
from phalanx.spec.errors import UserError
from phalanx.spec.files.replace import replace_file
from phalanx.spec.files.tables import parse_json
from phalanx.spec.parent_process import end_with_parent

SHARD_BYTES = 8 << 20
"""Size of the files of a shard, or of the part of one."""
SHARDS_SUFFIX = ".shards"
PLAN_FILE = "plan.json"
COMPLETE_SUFFIX = ".complete.json"


@dataclass(frozen=True)
class ShardedText:
    """Text that is tokenized shard by shard."""

    shards: list[list[SourceFile]]
    records: RecordFormat
    end: bool
    """Append the end token to documents."""
    max_bad_records: int
    folder: Path
    """Folder of the shards, with the tokenizer."""

    def prefix(self, number: int) -> Path:
        """Return the prefix of the pair of a shard."""
        return self.folder / f"{number:06d}"

    def is_complete(self, number: int) -> bool:
        """Return whether a shard has been written."""
        return Path(f"{self.prefix(number)}{COMPLETE_SUFFIX}").is_file()


@dataclass(frozen=True)
class PreparedText:
    """Counts of the complete shards."""

    counts: TokenizationCounts
    bad_records: list[BadRecord]
    num_shards: int
    num_missing: int
    """Shards that other nodes have not written yet; none if the pair is complete."""


def plan_shards(files: Sequence[SourceFile], field: str) -> list[list[SourceFile]]:
    """Divide files into shards of about `SHARD_BYTES`, in order. `field` (or option) names the files in errors."""
    shards: list[list[SourceFile]] = [[]]
    size = 0
    for part in (part for file in files for part in _split_file(file, field)):
        if shards[-1] and size + part.size > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(part)
        size += part.size
    return shards


def _split_file(file: SourceFile, field: str) -> Iterator[SourceFile]:
    """Yield parts of a large file of JSON lines or Parquet; other files as a whole."""
    spans: list[tuple[int, int, int]] = []
    if file.stored is not None:  # an object is copied as a whole, so one worker reads it
        yield file
        return
    if file.size > SHARD_BYTES and file.kind == "json_lines" and not is_compressed(file.path):
        starts = range(0, file.size, SHARD_BYTES)
        spans = [(start, min(start + SHARD_BYTES, file.size), SHARD_BYTES) for start in starts]
    elif file.size > SHARD_BYTES and file.kind == "parquet":
        parquet = import_extra("pyarrow.parquet", field, file.path)
        with suppress(ValueError, OSError):  # the reader says what is wrong
            metadata = parquet.ParquetFile(file.path).metadata
            groups = [metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups)]
            spans = [(group, group + 1, size) for group, size in enumerate(groups)]
    if not spans:
        yield file
    for start, end, size in spans:
        yield replace(file, span=(start, end), size=size)


def prepare_shards(
    sources: Sequence[str],
    tokenizer: Tokenizer,
    prefix: Path,
    *,
    records: RecordFormat = TEXT,
    end: bool = True,
    max_bad_records: int = 0,
    workers: int = 1,
    nodes: int = 1,
    node_rank: int = 0,
    force: bool = False,
    progress: Callable[[TokenizationCounts], None] = lambda counts: None,
) -> PreparedText:
    """Tokenize the shards of this node that are not complete, with several processes, and join all if none is missing.

    With `force`, complete shards of other text or settings are removed. Raises UserError if there are some without it,
    or the text is invalid. Errors of the file system are raised unchanged (OSError)."""
    files = list_source_files(sources, "SOURCE")
    folder = Path(f"{prefix}{SHARDS_SUFFIX}")
    text = ShardedText(plan_shards(files, "SOURCE"), records, end, max_bad_records, folder)
    _write_plan(text, tokenizer, force)
    own = range(node_rank, len(text.shards), nodes)
    counts = TokenizationCounts()
    for number in own:
        if text.is_complete(number):
            counts += _read_complete(text, number)[0]
    missing = [number for number in own if not text.is_complete(number)]
    for shard_counts in _tokenize_shards(text, missing, workers):
        counts += shard_counts
        progress(counts)
    num_missing = sum(not text.is_complete(number) for number in range(len(text.shards)))
    if num_missing and folder.exists():
        return PreparedText(counts, [], len(text.shards), num_missing)
    try:
        return _join_shards(text, tokenizer, prefix)
    except (OSError, UserError):
        if folder.exists() or not Path(f"{prefix}.idx").is_file():
            raise
        # Another node finished at the same time, and has joined the shards.
        return PreparedText(counts, [], len(text.shards), 0)


def _write_plan(text: ShardedText, tokenizer: Tokenizer, force: bool) -> None:
    """Create the folder of shards. Raises UserError if it has shards of other text or settings, without `force`."""
    shards = [[(*file.content_key, file.span) for file in shard] for shard in text.shards]
    inputs = [RECIPE_VERSION, tokenizer.fingerprint(), repr(text.records), text.end, shards]
    key = hashlib.sha256(json.dumps(inputs).encode("utf-8", "replace")).hexdigest()
    plan = text.folder / PLAN_FILE
    is_other = plan.is_file() and parse_json(plan.read_bytes()) != {"key": key}
    if is_other and force:
        shutil.rmtree(text.folder)
    elif is_other and any(text.folder.glob(f"*{COMPLETE_SUFFIX}")):
        problem = "has shards of other text, another tokenizer or other options"
        fix = "repeat the command that was interrupted, or discard its shards with --force"
        raise UserError("--out", str(text.folder), problem, fix)
    text.folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(text.folder / "tokenizer.json")
    replace_file(plan, json.dumps({"key": key}))


def _tokenize_shards(text: ShardedText, numbers: Sequence[int], workers: int) -> Iterator[TokenizationCounts]:
    """Tokenize shards in this process or in several others; yield the counts of each when it is complete."""
    if min(workers, len(numbers)) <= 1:
        limit_threads(workers)
        yield from (_tokenize_shard(text, number) for number in numbers)
        return
    # Workers must not share the threads and locks of this process, so they are not forks of it.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(workers, len(numbers)), context, initializer=_start_worker) as pool:
        futures = [pool.submit(_tokenize_shard, text, number) for number in numbers]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _start_worker() -> None:
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers
    limit_threads(1)


def _tokenize_shard(text: ShardedText, number: int) -> TokenizationCounts:
    """Write the pair of a shard, and then the file that says that it is complete."""
    bad_records = BadRecords(text.max_bad_records, "--max-bad-records")
    (counts,) = write_indexed_pairs(
        _iterate_documents(text, number, bad_records),
        _load_tokenizer(str(text.folder / "tokenizer.json")),
        [text.prefix(number)],
        end=text.end,
        kind=text.records.kind,
    )
    content = {"counts": asdict(counts), "bad_records": [asdict(record) for record in bad_records.list]}
    replace_file(Path(f"{text.prefix(number)}{COMPLETE_SUFFIX}"), json.dumps(content))
    return counts


@lru_cache(maxsize=1)
def _load_tokenizer(path: str) -> Tokenizer:
    return load_tokenizer(path)


def _iterate_documents(text: ShardedText, number: int, bad_records: BadRecords) -> Iterator[Document]:
    for file in text.shards[number]:
        yield from (doc for doc in read_documents(file, text.records, "SOURCE", bad_records) if not doc.is_empty)


def _read_complete(text: ShardedText, number: int) -> tuple[TokenizationCounts, list[BadRecord]]:
    content: Any = parse_json(Path(f"{text.prefix(number)}{COMPLETE_SUFFIX}").read_bytes())
    return TokenizationCounts(**content["counts"]), [BadRecord(**record) for record in content["bad_records"]]


def _join_shards(text: ShardedText, tokenizer: Tokenizer, prefix: Path) -> PreparedText:
    """Write the pair of all shards, and remove them. Two nodes that do so at once write the same files.

    Raises UserError if all shards together have no text or too many broken records."""
    numbers = range(len(text.shards))
    counts = TokenizationCounts()
    bad_records: list[BadRecord] = []
    for number in numbers:
        shard_counts, shard_bad_records = _read_complete(text, number)
        counts += shard_counts
        bad_records += shard_bad_records
    if len(bad_records) > text.max_bad_records:
        problem = f"is too low: {len(bad_records)} records are broken; {bad_records[text.max_bad_records].reason}"
        fix = f"correct them, or set --max-bad-records {len(bad_records)}"
        raise UserError("--max-bad-records", text.max_bad_records, problem, fix)
    if not counts.documents:
        raise UserError("SOURCE", text.shards[0][0].path, "has no text", "use files that contain text")
    partial_prefix = f"{prefix}.{os.getpid()}.partial"
    try:
        datasets = [IndexedDataset(text.prefix(number), "--out") for number in numbers]
        with open(f"{partial_prefix}.bin", "wb") as joined:
            for number in numbers:
                with open(f"{text.prefix(number)}.bin", "rb") as shard:
                    shutil.copyfileobj(shard, joined, 1 << 20)
        lengths = np.concatenate([np.diff(dataset.offsets) for dataset in datasets])
        write_index(f"{partial_prefix}.idx", lengths, datasets[0].tokens.dtype)
        write_pair_metadata(partial_prefix, tokenizer, text.records.kind)
        write_bad_records(f"{prefix}{BAD_RECORDS_SUFFIX}", bad_records)
        for suffix in PAIR_SUFFIXES:
            os.replace(f"{partial_prefix}{suffix}", f"{prefix}{suffix}")
    finally:
        for suffix in PAIR_SUFFIXES:
            Path(f"{partial_prefix}{suffix}").unlink(missing_ok=True)
    # At once, so that another node sees all shards or none.
    removed_folder = text.folder.with_name(f"{text.folder.name}.{os.getpid()}.removed")
    text.folder.rename(removed_folder)
    shutil.rmtree(removed_folder, ignore_errors=True)
    return PreparedText(counts, bad_records, len(text.shards), 0)

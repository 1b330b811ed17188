"""From a DataSpec to token files on disk: train and held-out text, tokenized once and kept in the cache."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

import numpy as np

from phalanx.data.indexed_dataset import IndexedDataset, prefix_of, split_tail
from phalanx.data.sources import Document, documents, is_held_out, list_source_files, read_documents
from phalanx.data.tokenize import Progress, disk_error, write_indexed_pairs
from phalanx.data.tokenizer import Tokenizer, byte_tokenizer, load_tokenizer, train_bpe
from phalanx.spec.errors import UserError
from phalanx.spec.run import DataSpec

RECIPE_VERSION = 2
"""Raise it when the same text would be written otherwise: it is part of the cache's key."""
COMPLETE_FILE = "complete.json"
MAX_FULL_CHECK_TOKENS = 20_000_000
STREAMING_HELD_OUT_DOCUMENTS = 1000


@dataclass(frozen=True)
class PreparedData:
    train: str
    """Prefix of the .bin/.idx pair to train on; "" where data.streaming tokenizes during training."""
    held_out: str
    """Prefix of the pair to evaluate on."""
    tokenizer: str
    """Path of the tokenizer.json."""


def prepare(data: DataSpec, progress: Progress | None = None) -> PreparedData:
    """Tokenize what `data` describes, unless an earlier run did.

    The cache's key is the names, sizes and times of all files (of a dataset on the hub, the name only), the
    tokenizer and the split. An entry is complete or absent: it is written aside and renamed, and of two runs
    at once the first wins. Raises UserError for anything wrong with the sources, the tokenizer or the cache.
    """
    check_sources(data)
    cache = Path(data.cache).expanduser()
    final_folder = cache / _fingerprint(data)
    try:
        if not (final_folder / COMPLETE_FILE).is_file():
            cache.mkdir(parents=True, exist_ok=True)
            temp_folder = Path(tempfile.mkdtemp(prefix=f"{final_folder.name}.", suffix=".partial", dir=cache))
            try:
                _write(data, temp_folder, progress)
                _publish(temp_folder, final_folder)
            finally:
                shutil.rmtree(temp_folder, ignore_errors=True)
    except OSError as error:
        raise disk_error("data.cache", data.cache, error) from None
    # A pair of the user's is read where it lies, but for its end where that is held out.
    train = _indexed_prefix(data.train, "data.train") if data.held_out else None
    train = "" if data.streaming else train or str(final_folder / "train")
    held_out = _indexed_prefix(data.held_out, "data.held_out") or str(final_folder / "held_out")
    return PreparedData(train, held_out, str(final_folder / "tokenizer.json"))


def check_sources(data: DataSpec) -> None:
    """Look at every source and the tokenizer, quickly. Raises UserError for the first that cannot work."""
    tokenizer = tokenizer_without_training(data)
    for field, sources in (("data.train", data.train), ("data.held_out", data.held_out)):
        if not sources and field == "data.held_out":
            continue
        prefix = _indexed_prefix(sources, field)
        if prefix is None:
            next(documents(sources, data.text_key, field))
        elif tokenizer is None:
            raise UserError(
                "data.tokenizer",
                data.tokenizer,
                f"cannot be trained from tokens, and {field} is the pair {prefix}",
                'give the tokenizer.json the tokens were made with, or "bytes"',
            )
        elif data.streaming and field == "data.train":
            raise UserError("data.streaming", True, f"{prefix} is tokens already", "set data.streaming = false")
        else:
            check_vocabulary(IndexedDataset(prefix, field), tokenizer, field)
    _check_overlap(data)


def check_vocabulary(dataset: IndexedDataset, tokenizer: Tokenizer, field: str) -> None:
    """Raise UserError if a token is no id of the tokenizer; of a large dataset, samples are looked at."""
    tokens = dataset.tokens
    if len(tokens) > MAX_FULL_CHECK_TOKENS:
        sample_starts = np.linspace(0, len(tokens) - 65_536, num=128, dtype=np.int64)
        tokens = np.concatenate([tokens[start : start + 65_536] for start in sample_starts])
    low, high = (int(tokens.min()), int(tokens.max())) if len(tokens) else (0, 0)
    if low < 0 or high >= tokenizer.vocab:
        raise UserError(
            field,
            dataset.prefix,
            f"has token id {high if low >= 0 else low}, and the tokenizer has ids 0 to {tokenizer.vocab - 1}",
            "give the tokenizer that these tokens were made with",
        )


def _check_overlap(data: DataSpec) -> None:
    if (
        not data.held_out
        or _indexed_prefix(data.train, "data.train")
        or _indexed_prefix(data.held_out, "data.held_out")
    ):
        return
    train_paths = {os.path.realpath(source_file.path) for source_file in list_source_files(data.train, "data.train")}
    for source_file in list_source_files(data.held_out, "data.held_out"):
        if os.path.realpath(source_file.path) in train_paths:
            raise UserError("data.held_out", source_file.path, "is in data.train too", "leave it out of one of them")


def _indexed_prefix(sources: Sequence[str], field: str) -> str | None:
    """The prefix that `sources` is, or None if they are text."""
    prefixes = [prefix for source in sources if (prefix := prefix_of(source)) is not None]
    if prefixes and len(sources) > 1:
        raise UserError(
            field,
            list(sources),
            "has a .bin/.idx pair beside other sources",
            "give one pair alone; merge pairs into one first",
        )
    return prefixes[0] if prefixes else None


def tokenizer_without_training(data: DataSpec) -> Tokenizer | None:
    """The tokenizer, if it can be had without the text; None where it is made from that.

    Raises UserError if it is a file that is no tokenizer.
    """
    if data.tokenizer == "bpe":
        return None
    return byte_tokenizer() if data.tokenizer == "bytes" else load_tokenizer(data.tokenizer)


def _training_texts(data: DataSpec) -> Iterator[str]:
    """Training text, its files in the order of their hashes, so that its beginning is a sample of it all.

    Where every document would be held out by name, the end of the text is instead: then it is all documents.
    """
    source_files = sorted(
        list_source_files(data.train),
        key=lambda source_file: hashlib.blake2b(source_file.name.encode("utf-8", "replace")).digest(),
    )

    def iter_texts(include_held_out: bool) -> Iterator[str]:
        all_documents = (
            document for source_file in source_files for document in read_documents(source_file, data.text_key)
        )
        return (document.text for document in all_documents if include_held_out or not _is_held_out(data, document))

    train_texts = iter_texts(include_held_out=False)
    first_text = next(train_texts, None)
    return iter_texts(include_held_out=True) if first_text is None else chain([first_text], train_texts)


def _is_held_out(data: DataSpec, document: Document) -> bool:
    return not data.held_out and is_held_out(document.name, data.held_out_fraction)


def _write(data: DataSpec, folder: Path, progress: Progress | None) -> None:
    """Fill a cache folder: tokenizer.json, and the pairs that are not the user's own."""
    tokenizer = tokenizer_without_training(data) or train_bpe(_training_texts(data), data.tokenizer_vocab)
    tokenizer.save(folder / "tokenizer.json")
    train, held_out = folder / "train", folder / "held_out"
    train_prefix = _indexed_prefix(data.train, "data.train")
    if data.held_out:
        if _indexed_prefix(data.held_out, "data.held_out") is None:
            write_indexed_pairs(
                documents(data.held_out, data.text_key, "data.held_out"), tokenizer, [held_out], progress=progress
            )
        if train_prefix is None and not data.streaming:
            write_indexed_pairs(documents(data.train, data.text_key), tokenizer, [train], progress=progress)
    elif train_prefix is not None:
        split_tail(IndexedDataset(train_prefix), data.held_out_fraction, train, held_out)
    elif data.streaming:
        _write_first_held_out(data, tokenizer, held_out, progress)
    else:
        _write_split(data, tokenizer, folder, progress)
    (folder / COMPLETE_FILE).write_text(data.model_dump_json(indent=1))


def _write_split(data: DataSpec, tokenizer: Tokenizer, folder: Path, progress: Progress | None) -> None:
    """Hold documents out by name; of so few that none or all would be, the end of the text instead."""
    prefixes = [folder / "train", folder / "held_out"]
    train_documents = documents(data.train, data.text_key)
    counts = write_indexed_pairs(
        train_documents, tokenizer, prefixes, lambda document: int(_is_held_out(data, document)), progress=progress
    )
    if not all(count.documents for count in counts):
        for prefix in prefixes:
            Path(f"{prefix}.bin").unlink()
        write_indexed_pairs(documents(data.train, data.text_key), tokenizer, [folder / "all"], progress=progress)
        split_tail(IndexedDataset(folder / "all"), data.held_out_fraction, *prefixes)


def _write_first_held_out(data: DataSpec, tokenizer: Tokenizer, prefix: Path, progress: Progress | None) -> None:
    """The first held-out documents only: a stream may be endless."""
    held_out = (document for document in documents(data.train, data.text_key) if _is_held_out(data, document))
    (counts,) = write_indexed_pairs(
        islice(held_out, STREAMING_HELD_OUT_DOCUMENTS), tokenizer, [prefix], progress=progress
    )
    if not counts.documents:
        raise UserError(
            "data.held_out", None, "no document of data.train is held out: it has too few", "give data.held_out"
        )


def _publish(temp_folder: Path, final_folder: Path) -> None:
    try:
        temp_folder.rename(final_folder)
    except OSError:
        if not (final_folder / COMPLETE_FILE).is_file():
            raise


def _fingerprint(data: DataSpec) -> str:
    key = data.model_dump(mode="json", exclude={"cache", "mask_documents"})
    for field, sources in (("data.train", data.train), ("data.held_out", data.held_out)):
        prefix = _indexed_prefix(sources, field)
        if prefix is not None:
            sources = [f"{prefix}.idx", f"{prefix}.bin"]
        source_files = list_source_files(sources, field) if sources else []
        key[field] = [
            (
                source_file.kind,
                os.path.abspath(source_file.path),
                source_file.name,
                source_file.size,
                source_file.mtime_ns,
            )
            for source_file in source_files
        ]
    if data.tokenizer not in ("bpe", "bytes"):
        key["tokenizer"] = hashlib.sha256(load_tokenizer(data.tokenizer).to_json().encode()).hexdigest()
    return hashlib.sha256(json.dumps([RECIPE_VERSION, key]).encode("utf-8", "replace")).hexdigest()[:20]

"""Token files for a DataSpec: train and held-out text, tokenized once and cached."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

from phalanx.data.indexed_dataset import IndexedDataset, join_pairs, split_tail
from phalanx.data.pair_metadata import read_pair_metadata, write_pair_metadata
from phalanx.data.source_checks import check_sources, indexed_prefixes, list_files
from phalanx.data.sources import RECIPE_VERSION, Document, documents, is_held_out, list_source_files, read_documents
from phalanx.data.tokenize import Progress, disk_error, write_indexed_pairs
from phalanx.data.tokenizer import Tokenizer, load_tokenizer, tokenizer_without_training, train_bpe
from phalanx.spec.errors import UserError
from phalanx.spec.run import DataSpec

logger = logging.getLogger(__name__)

COMPLETE_FILE = "complete.json"
STREAMING_HELD_OUT_DOCUMENTS = 1000


@dataclass(frozen=True)
class PreparedData:
    """Files that training reads."""

    train: str
    """Prefix of the .bin/.idx pair to train on; "" if data.streaming or data.dataset provides the tokens."""
    held_out: str
    """Prefix of the pair to evaluate on."""
    tokenizer: str
    """Path of the tokenizer.json."""


def prepare(data: DataSpec, progress: Progress | None = None) -> PreparedData:
    """Tokenize the text of `data`, unless the cache has it.

    The key of the cache consists of the paths, names, sizes and times of all files (only the name of a dataset on the
    hub), the tokenizer and the split. An entry is written to a temporary folder and renamed. If several runs write the
    same entry, the first wins.
    Raises UserError for errors of the sources, the tokenizer or the cache."""
    check_sources(data)
    cache = Path(data.cache).expanduser()
    final_folder = cache / _cache_key(data)
    try:
        if (final_folder / COMPLETE_FILE).is_file():
            logger.debug("tokens are read from %s", final_folder)
        else:
            cache.mkdir(parents=True, exist_ok=True)
            temp_folder = Path(tempfile.mkdtemp(prefix=f"{final_folder.name}.", suffix=".partial", dir=cache))
            try:
                _write_cache_folder(data, temp_folder, progress)
                try:
                    temp_folder.rename(final_folder)
                except OSError:
                    if not (final_folder / COMPLETE_FILE).is_file():
                        raise
            finally:
                shutil.rmtree(temp_folder, ignore_errors=True)
    except OSError as error:
        raise disk_error("data.cache", data.cache, error) from None
    # A pair of token files that the user provides is read in place, unless its end is held out.
    train_pairs = indexed_prefixes(data.train, "data.train") if data.held_out else []
    held_out_pairs = indexed_prefixes(data.held_out, "data.held_out")
    train = train_pairs[0] if len(train_pairs) == 1 else str(final_folder / "train")
    held_out = held_out_pairs[0] if len(held_out_pairs) == 1 else str(final_folder / "held_out")
    return PreparedData(train if data.writes_train_tokens else "", held_out, str(final_folder / "tokenizer.json"))


def _iterate_training_texts(data: DataSpec) -> Iterator[str]:
    """Yield the training text with its files in the order of their hashes, so that its beginning is a random sample.

    If every document would be held out by its name, the end of the text is held out instead, and all documents are
    yielded."""
    source_files = list_source_files(data.train)
    source_files.sort(key=lambda file: hashlib.blake2b(file.name.encode("utf-8", "replace")).digest())

    def iter_texts(include_held_out: bool) -> Iterator[str]:
        all_documents = (document for file in source_files for document in read_documents(file, data.text_key))
        return (document.text for document in all_documents if include_held_out or not _is_held_out(data, document))

    train_texts = iter_texts(include_held_out=False)
    first_text = next(train_texts, None)
    return iter_texts(include_held_out=True) if first_text is None else chain([first_text], train_texts)


def _is_held_out(data: DataSpec, document: Document) -> bool:
    return not data.held_out and is_held_out(document.name, data.held_out_fraction)


def _write_cache_folder(data: DataSpec, folder: Path, progress: Progress | None) -> None:
    """Fill a cache folder: tokenizer.json, and the pairs that are not the user's own."""
    tokenizer = tokenizer_without_training(data) or train_bpe(_iterate_training_texts(data), data.tokenizer_vocab)
    tokenizer.save(folder / "tokenizer.json")
    train = folder / "train"
    held_out = folder / "held_out"
    train_pairs = indexed_prefixes(data.train, "data.train")
    if data.held_out:
        _write_sources(data, "data.held_out", tokenizer, held_out, progress)
        if data.writes_train_tokens:
            _write_sources(data, "data.train", tokenizer, train, progress)
    elif train_pairs:
        _split_pairs(train_pairs, data.held_out_fraction, train, held_out)
        _carry_metadata(train_pairs, tokenizer, train, held_out)
    elif data.writes_train_tokens:
        _write_split(data, tokenizer, [train, held_out], progress)
    else:
        # Only the first held-out documents, because a stream may be endless.
        selected = (document for document in documents(data.train, data.text_key) if _is_held_out(data, document))
        first_selected = islice(selected, STREAMING_HELD_OUT_DOCUMENTS)
        (counts,) = write_indexed_pairs(first_selected, tokenizer, [held_out], progress=progress)
        if not counts.documents:
            problem = "is not set, and data.train has too few documents to hold one out"
            raise UserError("data.held_out", None, problem, "set data.held_out")
    (folder / COMPLETE_FILE).write_text(data.model_dump_json(indent=1))


def _write_sources(data: DataSpec, field: str, tokenizer: Tokenizer, prefix: Path, progress: Progress | None) -> None:
    """Write one pair from all sources of a field: from its text, or by joining its pairs. One pair is used in place."""
    sources = data.held_out if field == "data.held_out" else data.train
    pairs = indexed_prefixes(sources, field)
    if len(pairs) > 1:
        join_pairs([IndexedDataset(pair) for pair in pairs], prefix)
        _carry_metadata(pairs, tokenizer, prefix)
    elif not pairs:
        write_indexed_pairs(documents(sources, data.text_key, field), tokenizer, [prefix], progress=progress)


def _split_pairs(prefixes: Sequence[str], fraction: float, train: Path, held_out: Path) -> None:
    """Hold out the end of each pair."""
    if len(prefixes) == 1:
        split_tail(IndexedDataset(prefixes[0]), fraction, train, held_out)
        return
    split_prefixes = [(f"{train}-{number}", f"{held_out}-{number}") for number in range(len(prefixes))]
    for prefix, (head, tail) in zip(prefixes, split_prefixes, strict=True):
        split_tail(IndexedDataset(prefix), fraction, head, tail)
    join_pairs([IndexedDataset(head) for head, _ in split_prefixes], train)
    join_pairs([IndexedDataset(tail) for _, tail in split_prefixes], held_out)


def _carry_metadata(sources: Sequence[str], tokenizer: Tokenizer, *prefixes: Path) -> None:
    """Write the tokenizer next to derived pairs if all sources record it, which `check_sources` compared."""
    if all(read_pair_metadata(IndexedDataset(source)) for source in sources):
        for prefix in prefixes:
            write_pair_metadata(prefix, tokenizer)


def _write_split(data: DataSpec, tokenizer: Tokenizer, prefixes: list[Path], progress: Progress | None) -> None:
    """Hold documents out by name; if that selects none or all, hold out the end of the text."""

    def pair_of(document: Document) -> int:
        return int(_is_held_out(data, document))

    text = documents(data.train, data.text_key)
    counts = write_indexed_pairs(text, tokenizer, prefixes, pair_of, progress=progress)
    if not all(count.documents for count in counts):
        for prefix in prefixes:
            Path(f"{prefix}.bin").unlink()
        everything = prefixes[0].parent / "all"
        text = documents(data.train, data.text_key, logs_files=False)  # the first pass did
        write_indexed_pairs(text, tokenizer, [everything], progress=progress)
        split_tail(IndexedDataset(everything), data.held_out_fraction, *prefixes)
        _carry_metadata([str(everything)], tokenizer, *prefixes)


def _cache_key(data: DataSpec) -> str:
    inputs = data.model_dump(mode="json", exclude={"cache", "mask_documents", "train", "held_out", "dataset"})
    inputs["streaming"] = not data.writes_train_tokens
    for field, sources in (("data.train", data.train), ("data.held_out", data.held_out)):
        files = list_files(sources, field) if sources else []
        inputs[field] = [
            (file.kind, os.path.realpath(file.path), file.name, file.size, file.mtime_ns) for file in files
        ]
    if data.tokenizer not in ("bpe", "bytes"):
        inputs["tokenizer"] = hashlib.sha256(load_tokenizer(data.tokenizer).to_json().encode()).hexdigest()
    return hashlib.sha256(json.dumps([RECIPE_VERSION, inputs]).encode("utf-8", "replace")).hexdigest()[:20]

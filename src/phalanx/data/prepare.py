"""Token files for a DataSpec: train and held-out text, tokenized once and cached."""

from __future__ import annotations

import glob
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

from phalanx.data.indexed_dataset import IndexedDataset, join_pairs, prefix_of, split_tail
from phalanx.data.joined_tokens import PARTS_SUFFIX
from phalanx.data.pair_metadata import (
    METADATA_SUFFIX,
    PAIR_SUFFIXES,
    check_pair_tokenizer,
    read_pair_metadata,
    write_pair_metadata,
)
from phalanx.data.sources import (
    RECIPE_VERSION,
    Document,
    SourceFile,
    documents,
    is_held_out,
    list_source_files,
    read_documents,
)
from phalanx.data.tokenize import Progress, disk_error, write_indexed_pairs
from phalanx.data.tokenizer import Tokenizer, byte_tokenizer, load_tokenizer, train_bpe
from phalanx.spec.errors import UserError
from phalanx.spec.run import DataSpec

COMPLETE_FILE = "complete.json"
MAX_FULL_CHECK_TOKENS = 20_000_000
STREAMING_HELD_OUT_DOCUMENTS = 1000


@dataclass(frozen=True)
class PreparedData:
    """Files that training reads."""

    train: str
    """Prefix of the .bin/.idx pair to train on; "" if data.streaming tokenizes during training."""
    held_out: str
    """Prefix of the pair to evaluate on."""
    tokenizer: str
    """Path of the tokenizer.json."""


def prepare(data: DataSpec, progress: Progress | None = None) -> PreparedData:
    """Tokenize the text of `data`, unless the cache has it.

    The cache's key is the paths, names, sizes and times of all files (the name only of a dataset on the hub), the
    tokenizer and the split. An entry is written to a temporary folder and renamed; of concurrent runs the first wins.
    Raises UserError for errors of the sources, the tokenizer or the cache.
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
    # A pair of the user's is read in place, except for a held-out end.
    train_pairs = indexed_prefixes(data.train, "data.train") if data.held_out else []
    held_out_pairs = indexed_prefixes(data.held_out, "data.held_out")
    train = train_pairs[0] if len(train_pairs) == 1 else str(final_folder / "train")
    held_out = held_out_pairs[0] if len(held_out_pairs) == 1 else str(final_folder / "held_out")
    return PreparedData("" if data.streaming else train, held_out, str(final_folder / "tokenizer.json"))


def check_sources(data: DataSpec) -> None:
    """Check every source and the tokenizer quickly. Raises UserError for the first invalid one."""
    tokenizer = tokenizer_without_training(data)
    for field, sources in (("data.train", data.train), ("data.held_out", data.held_out)):
        if not sources and field == "data.held_out":
            continue
        prefixes = indexed_prefixes(sources, field)
        if not prefixes:
            next(documents(sources, data.text_key, field))
        elif tokenizer is None:
            raise UserError(
                "data.tokenizer",
                data.tokenizer,
                f"cannot be trained, because {field} contains tokens instead of text ({prefixes[0]})",
                fix='set data.tokenizer to the tokenizer.json of these tokens, or to "bytes"',
            )
        elif data.streaming and field == "data.train":
            raise UserError(
                "data.streaming",
                True,
                f"cannot be combined with {prefixes[0]}, which is already tokenized",
                fix="set data.streaming = false",
            )
        else:
            for prefix in prefixes:
                check_tokens(IndexedDataset(prefix, field), tokenizer, field)
    _check_overlap(data)


def check_tokens(dataset: IndexedDataset, tokenizer: Tokenizer, field: str) -> None:
    """Raise UserError if the tokens of a pair have another tokenizer or ids outside its vocabulary."""
    check_pair_tokenizer(dataset, tokenizer, field)
    check_vocabulary(dataset, tokenizer, field)


def describe_unchecked_pairs(data: DataSpec) -> str | None:
    """Return a line about the pairs without a recorded tokenizer; None if there are none."""
    prefixes = [*indexed_prefixes(data.train, "data.train"), *indexed_prefixes(data.held_out, "data.held_out")]
    unchecked = [prefix for prefix in prefixes if read_pair_metadata(IndexedDataset(prefix)) is None]
    if not unchecked:
        return None
    more = f" and {len(unchecked) - 1} more" if len(unchecked) > 1 else ""
    return (
        f"cannot check that data.tokenizer = {data.tokenizer!r} matches the tokens of {unchecked[0]}{more}, because "
        f"the {METADATA_SUFFIX} file is missing. With another tokenizer, bits per byte and exports are wrong"
    )


def check_vocabulary(dataset: IndexedDataset, tokenizer: Tokenizer, field: str) -> None:
    """Raise UserError if a token is not an id of the tokenizer; large datasets are sampled."""
    size = len(dataset.tokens)
    if size > MAX_FULL_CHECK_TOKENS:
        sample_starts = np.linspace(0, size - 65_536, num=128, dtype=np.int64)
        tokens = np.concatenate([dataset.tokens[start : start + 65_536] for start in sample_starts])
    else:
        tokens = dataset.tokens[:size]
    low, high = (int(tokens.min()), int(tokens.max())) if len(tokens) else (0, 0)
    if low < 0 or high >= tokenizer.vocab:
        raise UserError(
            field,
            dataset.prefix,
            f"has token id {high if low >= 0 else low}, but the tokenizer only has ids 0 to {tokenizer.vocab - 1}",
            fix="use the tokenizer of these tokens",
        )


def _check_overlap(data: DataSpec) -> None:
    # Pairs are compared by their indices: two may have separate documents of one .bin file.
    train_files = _list_files(data.train, "data.train", (".idx",))
    train_paths = {os.path.realpath(source_file.path) for source_file in train_files}
    for source_file in _list_files(data.held_out, "data.held_out", (".idx",)) if data.held_out else []:
        if os.path.realpath(source_file.path) in train_paths:
            raise UserError(
                "data.held_out", source_file.path, "is also in data.train", fix="remove it from one of the two lists"
            )


def indexed_prefixes(sources: Sequence[str], field: str) -> list[str]:
    """Return the prefixes of the .bin/.idx pairs in `sources`, in order; none for text.

    A pair whose .bin and .idx are both named counts once; a source that is named twice counts twice. Raises UserError
    if `sources` name pairs and text.
    """
    paths = [(source, path) for source in sources for path in _expand_pattern(source)]
    pairs = [(source, prefix) for source, path in paths if (prefix := prefix_of(path)) is not None]
    if pairs and len(pairs) < len(paths):
        raise UserError(
            field,
            list(sources),
            "contains both .bin/.idx pairs and text",
            fix="convert the text into a pair with `phalanx data prepare` and the same tokenizer, and use its prefix",
        )
    first_sources = {os.path.realpath(prefix): source for source, prefix in reversed(pairs)}
    return [prefix for source, prefix in pairs if first_sources[os.path.realpath(prefix)] == source]


def _expand_pattern(source: str) -> list[str]:
    """Return the pairs that a pattern matches, and its other files; a source without pairs unchanged."""
    path = os.path.expanduser(source)
    if not glob.has_magic(source) or os.path.exists(path):
        return [source]
    matches = sorted(glob.glob(path, recursive=True))
    stems = sorted({stem for stem, suffix in map(os.path.splitext, matches) if suffix in (".bin", ".idx")})
    stems = [stem for stem in stems if os.path.isfile(f"{stem}.idx") and os.path.isfile(f"{stem}.bin")]
    pair_files = {f"{stem}{suffix}" for stem in stems for suffix in PAIR_SUFFIXES}
    return [*stems, *(match for match in matches if match not in pair_files)] if stems else [source]


def _list_files(
    sources: Sequence[str], field: str, pair_suffixes: Sequence[str] = (".idx", ".bin", PARTS_SUFFIX)
) -> list[SourceFile]:
    """List the files of text or pairs."""
    names = (f"{prefix}{suffix}" for prefix in indexed_prefixes(sources, field) for suffix in pair_suffixes)
    return list_source_files([name for name in names if os.path.isfile(name)] or sources, field)


def tokenizer_without_training(data: DataSpec) -> Tokenizer | None:
    """Return the tokenizer if it needs no training, else None. Raises UserError for an invalid file."""
    if data.tokenizer == "bpe":
        return None
    return byte_tokenizer() if data.tokenizer == "bytes" else load_tokenizer(data.tokenizer)


def _training_texts(data: DataSpec) -> Iterator[str]:
    """Yield training text, its files in the order of their hashes, so that its start is a sample.

    If every document would be held out by name, the end of the text is held out instead: then it is all documents.
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
    train = folder / "train"
    held_out = folder / "held_out"
    train_pairs = indexed_prefixes(data.train, "data.train")
    if data.held_out:
        held_out_pairs = indexed_prefixes(data.held_out, "data.held_out")
        if len(held_out_pairs) > 1:
            join_pairs([IndexedDataset(prefix) for prefix in held_out_pairs], held_out)
            _carry_metadata(held_out_pairs, tokenizer, held_out)
        elif not held_out_pairs:
            write_indexed_pairs(
                documents(data.held_out, data.text_key, "data.held_out"), tokenizer, [held_out], progress=progress
            )
        if len(train_pairs) > 1:
            join_pairs([IndexedDataset(prefix) for prefix in train_pairs], train)
            _carry_metadata(train_pairs, tokenizer, train)
        elif not train_pairs and not data.streaming:
            write_indexed_pairs(documents(data.train, data.text_key), tokenizer, [train], progress=progress)
    elif train_pairs:
        _split_pairs(train_pairs, data.held_out_fraction, train, held_out=held_out)
        _carry_metadata(train_pairs, tokenizer, train, held_out)
    elif data.streaming:
        _write_first_held_out(data, tokenizer, held_out, progress=progress)
    else:
        _write_split(data, tokenizer, folder, progress=progress)
    (folder / COMPLETE_FILE).write_text(data.model_dump_json(indent=1))


def _split_pairs(prefixes: Sequence[str], fraction: float, train: Path, held_out: Path) -> None:
    """Hold out the end of each pair."""
    if len(prefixes) == 1:
        split_tail(IndexedDataset(prefixes[0]), fraction, train, tail=held_out)
        return
    parts = [(f"{train}-{number}", f"{held_out}-{number}") for number in range(len(prefixes))]
    for prefix, (head, tail) in zip(prefixes, parts, strict=True):
        split_tail(IndexedDataset(prefix), fraction, head, tail=tail)
    join_pairs([IndexedDataset(head) for head, _ in parts], train)
    join_pairs([IndexedDataset(tail) for _, tail in parts], held_out)


def _carry_metadata(sources: Sequence[str], tokenizer: Tokenizer, *prefixes: Path) -> None:
    """Write the tokenizer next to derived pairs if all sources record it, which `check_sources` compared."""
    if all(read_pair_metadata(IndexedDataset(source)) for source in sources):
        for prefix in prefixes:
            write_pair_metadata(prefix, tokenizer)


def _write_split(data: DataSpec, tokenizer: Tokenizer, folder: Path, progress: Progress | None) -> None:
    """Hold documents out by name; if that selects none or all, hold out the end of the text."""
    prefixes = [folder / "train", folder / "held_out"]
    train_documents = documents(data.train, data.text_key)
    counts = write_indexed_pairs(
        train_documents,
        tokenizer,
        prefixes,
        choose=lambda document: int(_is_held_out(data, document)),
        progress=progress,
    )
    if not all(count.documents for count in counts):
        for prefix in prefixes:
            Path(f"{prefix}.bin").unlink()
        write_indexed_pairs(documents(data.train, data.text_key), tokenizer, [folder / "all"], progress=progress)
        split_tail(IndexedDataset(folder / "all"), data.held_out_fraction, *prefixes)
        _carry_metadata([str(folder / "all")], tokenizer, *prefixes)


def _write_first_held_out(data: DataSpec, tokenizer: Tokenizer, prefix: Path, progress: Progress | None) -> None:
    """Write only the first held-out documents, because a stream may be endless."""
    held_out = (document for document in documents(data.train, data.text_key) if _is_held_out(data, document))
    (counts,) = write_indexed_pairs(
        islice(held_out, STREAMING_HELD_OUT_DOCUMENTS), tokenizer, [prefix], progress=progress
    )
    if not counts.documents:
        raise UserError(
            "data.held_out", None, "data.train has too few documents to hold one out", fix="set data.held_out"
        )


def _publish(temp_folder: Path, final_folder: Path) -> None:
    try:
        temp_folder.rename(final_folder)
    except OSError:
        if not (final_folder / COMPLETE_FILE).is_file():
            raise


def _fingerprint(data: DataSpec) -> str:
    key = data.model_dump(mode="json", exclude={"cache", "mask_documents", "train", "held_out"})
    for field, sources in (("data.train", data.train), ("data.held_out", data.held_out)):
        source_files = _list_files(sources, field) if sources else []
        key[field] = [
            (file.kind, os.path.realpath(file.path), file.name, file.size, file.mtime_ns) for file in source_files
        ]
    if data.tokenizer not in ("bpe", "bytes"):
        key["tokenizer"] = hashlib.sha256(load_tokenizer(data.tokenizer).to_json().encode()).hexdigest()
    return hashlib.sha256(json.dumps([RECIPE_VERSION, key]).encode("utf-8", "replace")).hexdigest()[:20]

"""Checks of a run's sources of text and tokens, and of their tokenizer, before anything is written."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence

import numpy as np

from phalanx.data.indexed_dataset import IndexedDataset, prefix_of
from phalanx.data.joined_tokens import PARTS_SUFFIX
from phalanx.data.pair_metadata import METADATA_SUFFIX, PAIR_SUFFIXES, check_pair_tokenizer, read_pair_metadata
from phalanx.data.sources import SourceFile, documents, list_source_files
from phalanx.data.tokenizer import Tokenizer, tokenizer_without_training
from phalanx.spec.errors import UserError
from phalanx.spec.run import DataSpec

MAX_FULL_CHECK_TOKENS = 20_000_000


def check_paths(data: DataSpec) -> None:
    """Raise UserError for the first source that does not exist or has no files."""
    for field, sources in (("data.train", data.train), ("data.held_out", data.held_out)):
        if sources:
            list_files(sources, field)


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
            problem = f"cannot be trained, because {field} contains tokens instead of text ({prefixes[0]})"
            fix = 'set data.tokenizer to the tokenizer.json of these tokens, or to "bytes"'
            raise UserError("data.tokenizer", data.tokenizer, problem, fix)
        elif data.streaming and field == "data.train":
            problem = f"cannot be combined with {prefixes[0]}, which is already tokenized"
            raise UserError("data.streaming", True, problem, "set data.streaming = false")
        else:
            for prefix in prefixes:
                check_tokens(IndexedDataset(prefix, field), tokenizer, field)
    # Pairs are compared by their indices: two may have separate documents of one .bin file.
    train_paths = {os.path.realpath(file.path) for file in list_files(data.train, "data.train", (".idx",))}
    for file in list_files(data.held_out, "data.held_out", (".idx",)) if data.held_out else []:
        if os.path.realpath(file.path) in train_paths:
            fix = "remove it from one of the two lists"
            raise UserError("data.held_out", file.path, "is also in data.train", fix)


def check_tokens(dataset: IndexedDataset, tokenizer: Tokenizer, field: str) -> None:
    """Raise UserError if the tokens of a pair have another tokenizer or ids outside its vocabulary.

    `field` of the run file names the pair."""
    check_pair_tokenizer(dataset, tokenizer, field)
    check_vocabulary(dataset, tokenizer, field)


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
        invalid_id = high if low >= 0 else low
        problem = f"has token id {invalid_id}, but the tokenizer only has ids 0 to {tokenizer.vocab - 1}"
        raise UserError(field, dataset.prefix, problem, "use the tokenizer of these tokens")


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


def indexed_prefixes(sources: Sequence[str], field: str) -> list[str]:
    """Return the prefixes of the .bin/.idx pairs in `sources`, in order; none for text.

    A pair whose .bin and .idx are both named counts once; a source that is named twice counts twice. Raises UserError
    if `sources` name pairs and text."""
    paths = [(source, path) for source in sources for path in _expand_pattern(source)]
    pairs = [(source, prefix) for source, path in paths if (prefix := prefix_of(path)) is not None]
    if pairs and len(pairs) < len(paths):
        fix = "convert the text into a pair with `phalanx data prepare` and the same tokenizer, and use its prefix"
        raise UserError(field, list(sources), "contains both .bin/.idx pairs and text", fix)
    first_sources = {os.path.realpath(prefix): source for source, prefix in reversed(pairs)}
    return [prefix for source, prefix in pairs if first_sources[os.path.realpath(prefix)] == source]


def list_files(
    sources: Sequence[str], field: str, pair_suffixes: Sequence[str] = (".idx", ".bin", PARTS_SUFFIX)
) -> list[SourceFile]:
    """List the files of text or pairs, of which those with `pair_suffixes` count."""
    names = (f"{prefix}{suffix}" for prefix in indexed_prefixes(sources, field) for suffix in pair_suffixes)
    return list_source_files([name for name in names if os.path.isfile(name)] or sources, field)


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

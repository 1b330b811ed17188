"""Checks of a run's sources of text and tokens, and of their tokenizer, before anything is written."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from phalanx.data.bad_records import BadRecords
from phalanx.data.chat_template import ChatTemplate
from phalanx.data.hf_datasets import PREFIX
from phalanx.data.indexed_dataset import IndexedDataset, prefix_of
from phalanx.data.joined_tokens import PARTS_SUFFIX
from phalanx.data.object_cache import object_cache, use_object_cache
from phalanx.data.packing import token_ids
from phalanx.data.pair_metadata import (
    METADATA_SUFFIX,
    PAIR_SUFFIXES,
    check_pair_tokenizer,
    has_preference_pairs,
    has_whole_documents,
    read_pair_metadata,
    recorded_kind,
)
from phalanx.data.places import StoredObject, errors_of_store, find_object, list_objects
from phalanx.data.record_formats import TEXT_KEY, ChatFormat, PreferenceFormat, PromptFormat, RecordFormat, TextFormat
from phalanx.data.sources import SourceFile, documents, list_source_files
from phalanx.data.tokenizer import Tokenizer, chat_template, tokenizer_without_training
from phalanx.spec.base import require
from phalanx.spec.errors import UserError
from phalanx.spec.local_paths import is_url
from phalanx.spec.mixture import RecordKind, SourceSpec, TooLong
from phalanx.spec.run import DataSpec

MAX_FULL_CHECK_TOKENS = 20_000_000


@dataclass(frozen=True)
class TextField:
    """A field of the run file that names text or tokens."""

    name: str
    sources: list[str]
    records: RecordFormat
    max_bad_records: int


def text_fields(data: DataSpec) -> list[TextField]:
    """Return the fields with training data, of a mixture one for each source, then those with held-out text if any."""
    fields = [
        TextField(f"data.source[{number}].path", part.train, records_of(part), part.max_bad_records)
        for number, part in enumerate(parts_of_mixture(data))
    ] or [TextField("data.train", data.train, records_of(data), data.max_bad_records)]
    held_out = {"data.held_out": data.held_out} if data.held_out else {}
    held_out |= {f"data.held_out_sets.{name}": sources for name, sources in data.held_out_sets.items()}
    texts = [
        TextField(name, text, records_of(data_of_set(data, name)), data.max_bad_records)
        for name, text in held_out.items()
    ]
    return [*fields, *texts]


def data_of_set(data: DataSpec, field: str) -> DataSpec:
    """Return the data whose format a held-out text has, by its field: of the source of the same name, if there is one.

    `field` is "data.held_out", or that of a set."""
    name = field.removeprefix("data.held_out_sets.")
    names = [source.name for source in data.source]
    return parts_of_mixture(data)[names.index(name)] if name in names else data


def parts_of_mixture(data: DataSpec) -> list[DataSpec]:
    """Return the data of each source of a mixture by itself, without held-out text."""
    return [
        data.replace(
            train=_add_config_and_split(source, number),
            format=source.format or data.format,
            text_key=source.text_key or data.text_key,
            chat_template=template_of(data, source.format or data.format),
            too_long=source.too_long or data.too_long,
            max_bad_records=data.max_bad_records if source.max_bad_records is None else source.max_bad_records,
            source=[],
            held_out=[],
            held_out_sets={},
        )
        for number, source in enumerate(data.source)
    ]


def template_of(data: DataSpec, kind: RecordKind) -> str | None:
    """Return the template of `data` for records of a kind: text has none."""
    return None if kind == "text" else data.chat_template


def _add_config_and_split(source: SourceSpec, number: int) -> list[str]:
    """Return the paths of source `number`, with the configuration and the split of its Hugging Face datasets.

    Raises UserError if it has other text."""
    if source.config is None and source.split is None:
        return source.path
    name = "config" if source.config is not None else "split"
    for path in source.path:
        field = f"data.source[{number}].{name}"
        value = getattr(source, name)
        problem = f"belongs to Hugging Face datasets, but path has {path!r}"
        require(path.startswith(PREFIX), field, value, problem, f"write hf:NAME as path, or remove {name}")
        fix = "write configuration and split in one of the two places"
        require(":" not in path.removeprefix(PREFIX), field, value, f"is also in path, {path!r}", fix)
    return [f"{path}:{source.config or ''}:{source.split or ''}" for path in source.path]


def long_held_out(data: DataSpec) -> list[TooLong]:
    """Return what happens to long conversations of each of `PreparedData.held_out_sources`, or of its `held_out`."""
    if data.held_out_sets:
        return [data_of_set(data, name).too_long for name in data.held_out_sets]
    if data.held_out or not data.source:
        return [data.too_long]
    return [source.too_long or data.too_long for source in data.source]


def records_of(data: DataSpec) -> RecordFormat:
    """Return what the records of `data` are. Raises UserError if conversations have no template."""
    if data.format == "text":
        return TextFormat(data.text_key or TEXT_KEY)
    if data.format == "prompt":
        return PromptFormat(chat_template(data))
    if data.format == "preference":
        return PreferenceFormat(chat_template(data))
    return ChatFormat(require_template(data), data.text_key)


def require_template(data: DataSpec) -> ChatTemplate:
    """Return the template that renders the conversations of `data`. Raises UserError if there is none."""
    template = chat_template(data)
    if template is None:
        problem = f"has no chat template, which data.format = {data.format!r} needs"
        fix = 'set data.chat_template to a Jinja file, "chatml" or "plain"'
        raise UserError("data.tokenizer", data.tokenizer, problem, fix)
    return template


@contextmanager
def errors_of_source(field: str) -> Iterator[None]:
    """Name a source of a mixture in errors, instead of the fields of a run without one. `field` is its path."""
    try:
        yield
    except UserError as error:
        if field.startswith("data.source"):
            own_names = {"data.train": field, "data.text_key": field.replace(".path", ".text_key")}
            error.field = own_names.get(error.field, error.field)
        raise


@contextmanager
def naming_text(prefix: str, sources: list[str]) -> Iterator[None]:
    """Name the text that the user wrote in errors, instead of its token files in the cache."""
    try:
        yield
    except UserError as error:
        if error.value == prefix:
            error.value = sources
        raise


def check_paths(data: DataSpec) -> None:
    """Raise UserError for the first source that does not exist or has no files."""
    use_object_cache(data)
    for field in text_fields(data):
        list_files(field.sources, field.name)


def check_sources(data: DataSpec) -> None:
    """Check every source and the tokenizer quickly. Raises UserError for the first invalid one."""
    use_object_cache(data)
    tokenizer = tokenizer_without_training(data)
    train_paths: set[str] = set()
    for text_field in text_fields(data):
        field = text_field.name
        sources = text_field.sources
        prefixes = indexed_prefixes(sources, field)
        if not prefixes:
            with errors_of_source(field):
                bad_records = BadRecords(text_field.max_bad_records)
                first = next(documents(sources, text_field.records, field, bad_records))
            if first.tokens is not None and tokenizer is None:
                _refuse_training(data, field, first.name)
        elif tokenizer is None:
            _refuse_training(data, field, prefixes[0])
        elif data.streaming and field == "data.train":
            problem = f"cannot be combined with {prefixes[0]}, which is already tokenized"
            raise UserError("data.streaming", True, problem, "set data.streaming = false")
        else:
            for prefix in prefixes:
                dataset = IndexedDataset(prefix, field)
                check_tokens(dataset, tokenizer, field)
                check_kind(dataset, text_field)
        # Pairs are compared by their indices: two may have separate documents of one .bin file.
        for file in list_files(sources, field, (".idx",)):
            if not field.startswith("data.held_out"):
                train_paths.add(os.path.realpath(file.path))
            elif os.path.realpath(file.path) in train_paths:
                problem = f"is also in {'data.source' if data.source else 'data.train'}"
                raise UserError(field, file.path, problem, "remove it from one of the two lists")


def _refuse_training(data: DataSpec, field: str, source: str) -> None:
    problem = f"cannot be trained, because {field} contains tokens instead of text ({source})"
    fix = 'set data.tokenizer to the tokenizer.json of these tokens, or to "bytes"'
    raise UserError("data.tokenizer", data.tokenizer, problem, fix)


def check_tokens(dataset: IndexedDataset, tokenizer: Tokenizer, field: str) -> None:
    """Raise UserError if the tokens of a pair have another tokenizer or ids outside its vocabulary.

    `field` of the run file names the pair."""
    check_pair_tokenizer(dataset, tokenizer, field)
    check_vocabulary(dataset, tokenizer, field)


def check_kind(dataset: IndexedDataset, field: TextField) -> None:
    """Raise UserError if the tokens of a field have pairs of answers, and its records have none, or the reverse."""
    has_pairs = has_preference_pairs(dataset)
    if has_pairs and field.records.kind != "preference":
        fix = 'set data.format = "preference", with a table [preference]'
        raise UserError(field.name, dataset.prefix, "has pairs of chosen and rejected answers", fix)
    if field.records.kind in ("chat", "prompt") and recorded_kind(dataset) == "text":
        fix = f'set data.format = "text", or use `phalanx data prepare --format {field.records.kind}`'
        raise UserError(
            field.name, dataset.prefix, "has text without masks, so that all of it would be trained on", fix
        )
    if field.records.kind == "preference" and not has_pairs:
        fix = "use the text, or `phalanx data prepare --format preference`"
        raise UserError(field.name, dataset.prefix, "has no pairs of chosen and rejected answers", fix)


def check_vocabulary(dataset: IndexedDataset, tokenizer: Tokenizer, field: str) -> None:
    """Raise UserError if a token is not an id of the tokenizer; large datasets are sampled."""
    size = len(dataset.tokens)
    if size > MAX_FULL_CHECK_TOKENS:
        sample_starts = np.linspace(0, size - 65_536, num=128, dtype=np.int64)
        tokens = np.concatenate([dataset.tokens[start : start + 65_536] for start in sample_starts])
    else:
        tokens = dataset.tokens[:size]
    if has_whole_documents(dataset):
        tokens = token_ids(tokens)
    low, high = (int(tokens.min()), int(tokens.max())) if len(tokens) else (0, 0)
    if low < 0 or high >= tokenizer.vocab:
        invalid_id = high if low >= 0 else low
        problem = f"has token id {invalid_id}, but the tokenizer only has ids 0 to {tokenizer.vocab - 1}"
        raise UserError(field, dataset.prefix, problem, "use the tokenizer of these tokens")


def describe_unchecked_pairs(data: DataSpec) -> str | None:
    """Return a line about the pairs without a recorded tokenizer; None if there are none."""
    prefixes = [prefix for field in text_fields(data) for prefix in indexed_prefixes(field.sources, field.name)]
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
    paths = [(source, path) for source in sources for path in _expand_pattern(source, field)]
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


def _expand_pattern(source: str, field: str) -> list[str]:
    """Return the pairs that a pattern matches, and its other files; a source without pairs unchanged."""
    if is_url(source):
        return _copy_pairs(source, field) or [source]
    path = os.path.expanduser(source)
    if not glob.has_magic(source) or os.path.exists(path):
        return [source]
    matches = sorted(glob.glob(path, recursive=True))
    stems = sorted({stem for stem, suffix in map(os.path.splitext, matches) if suffix in (".bin", ".idx")})
    stems = [stem for stem in stems if os.path.isfile(f"{stem}.idx") and os.path.isfile(f"{stem}.bin")]
    pair_files = {f"{stem}{suffix}" for stem in stems for suffix in PAIR_SUFFIXES}
    return [*stems, *(match for match in matches if match not in pair_files)] if stems else [source]


def _copy_pairs(source: str, field: str) -> list[str]:
    """Return the prefixes of local copies of the pairs in a store that a URL names or matches.

    The copies remain until this process ends, because ranks map them into memory."""
    stem, suffix = os.path.splitext(source)
    stem = stem if suffix in (".bin", ".idx") else source
    if not glob.has_magic(source):
        with errors_of_store(field, source):
            objects = [stored for end in PAIR_SUFFIXES if (stored := find_object(f"{stem}{end}"))]
    else:
        objects = [stored for stored in list_objects(source, field) if stored.url.endswith(PAIR_SUFFIXES)]
    pairs: dict[str, list[StoredObject]] = {}
    for stored in objects:
        end = next(end for end in PAIR_SUFFIXES if stored.url.endswith(end))
        pairs.setdefault(stored.url.removesuffix(end), []).append(stored)
    complete = {
        url: files
        for url, files in sorted(pairs.items())
        if {f"{url}.bin", f"{url}.idx"} <= {file.url for file in files}
    }
    return [str(object_cache().hold(files, field) / Path(url).name) for url, files in complete.items()]

"""Hugging Face datasets by name or of a directory, row by row: none is converted as a whole before its first row.

A directory has what `save_to_disk` wrote, or the data files of a dataset repository. Nothing of a dataset is run: since
version 4, `datasets` has no scripts, and only readers of data files without pickles are accepted."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from phalanx.data.compression import import_extra
from phalanx.spec.errors import UserError
from phalanx.spec.local_paths import hide_credentials

PREFIX = "hf:"
DEFAULT_SPLIT = "train"
SAVED_DATASET_FILES = ("state.json", "dataset_dict.json")
"""Files of a directory by `save_to_disk`: of one split, or of several."""
DATASET_INFO_FILE = "dataset_info.json"
SAFE_READERS = ("arrow", "cache", "csv", "json", "parquet", "text", "webdataset")
"""Modules of `datasets.packaged_modules` that read text without pickles."""


class HfSource(NamedTuple):
    """A source `hf:NAME:CONFIG:SPLIT`; the last two may be left out or empty."""

    path: str
    """Name on the hub, or a directory."""
    config: str | None
    split: str | None
    """None: "train", or the only split of a directory."""


def parse_hf_source(source: str) -> HfSource:
    """Return the parts of a source that starts with `hf:`."""
    path, config, split = [*source.removeprefix(PREFIX).split(":", 2), "", ""][:3]
    return HfSource(os.path.expanduser(path), config or None, split or None)


def full_name(source: HfSource) -> str:
    """Return a source with all of its parts, and a directory by its absolute path."""
    path = os.path.abspath(source.path) if os.path.isdir(source.path) else source.path
    return f"{PREFIX}{path}:{source.config or ''}:{source.split or ''}".rstrip(":")


def is_saved_dataset(path: str) -> bool:
    """Return whether `save_to_disk` wrote a directory."""
    return any(os.path.isfile(os.path.join(path, name)) for name in SAVED_DATASET_FILES)


def read_rows(
    source: str, choose_columns: Callable[[Sequence[str]], list[str]], field: str, first: int = 0
) -> Iterator[dict[str, Any]]:
    """Yield the rows of a dataset from index `first` on, with the chosen ones of its columns, or all if none is.

    Raises UserError, reported under `field`, if there is no such dataset, configuration or split, or a row cannot be
    read."""
    datasets = import_extra("datasets", field, source)
    parts = parse_hf_source(source)
    try:
        rows = _open_saved(datasets, parts, source, field) if is_saved_dataset(parts.path) else None
        rows = _open_by_builder(datasets, parts, source, field) if rows is None else rows
        if rows.column_names is not None and (columns := choose_columns(rows.column_names)):
            rows = rows.select_columns(columns)
        yield from rows.skip(first)
    except UserError:
        raise
    except Exception as error:  # a hub, a reader of files or a cache may raise anything
        fix = "check the name, the connection and the files"
        raise UserError(field, source, f"cannot be loaded: {hide_credentials(str(error))}", fix) from None


def _open_saved(datasets: Any, parts: HfSource, source: str, field: str) -> Any:
    """Return the split of a directory by `save_to_disk`."""
    if parts.config is not None:
        problem = f"has no configuration {parts.config!r}: a dataset by save_to_disk has splits only"
        raise UserError(field, source, problem, f"use {PREFIX}{parts.path}::{parts.split or 'SPLIT'}")
    saved = datasets.load_from_disk(parts.path)
    if isinstance(saved, dict):
        return saved[_choose_split(parts, list(saved), source, field)]
    if parts.split is not None and saved.split is not None:
        _choose_split(parts, [str(saved.split)], source, field)
    return saved


def _open_by_builder(datasets: Any, parts: HfSource, source: str, field: str) -> Any:
    """Return the split of a dataset repository, whose data files are read while its rows are."""
    try:
        builder = datasets.load_dataset_builder(parts.path, parts.config)
    except ValueError:
        configs = datasets.get_dataset_config_names(parts.path)
        if parts.config in configs or (parts.config is None and len(configs) == 1):
            raise
        problem = f"has no configuration {parts.config!r}" if parts.config else "has several configurations"
        names = ", ".join(f"{PREFIX}{parts.path}:{name}" for name in configs)
        raise UserError(field, source, problem, f"use one of {names}") from None
    reader = type(builder).__module__.rpartition(".")[2]
    if not type(builder).__module__.startswith("datasets.packaged_modules.") or reader not in SAFE_READERS:
        problem = f"has files that are read by {reader!r}, but only {', '.join(SAFE_READERS)} are allowed"
        raise UserError(field, source, problem, "convert the dataset to Parquet")
    splits = list(builder.info.splits or builder.config.data_files or [parts.split or DEFAULT_SPLIT])
    return builder.as_streaming_dataset(_choose_split(parts, splits, source, field))


def _choose_split(parts: HfSource, splits: Sequence[str], source: str, field: str) -> str:
    """Return the split of a source. Raises UserError if the dataset does not have it."""
    split = parts.split or DEFAULT_SPLIT
    if split not in splits:
        names = ", ".join(f"{PREFIX}{parts.path}:{parts.config or ''}:{name}" for name in splits)
        raise UserError(field, source, f"has no split {split!r}", f"use one of {names}")
    return split

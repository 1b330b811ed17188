"""Files with data in a folder of this machine or of a store: none that are hidden or describe other files."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

from phalanx.data.bad_records import BAD_RECORDS_SUFFIX
from phalanx.data.compression import COMPRESSED_SUFFIXES
from phalanx.data.hf_datasets import DATASET_INFO_FILE, SAVED_DATASET_FILES
from phalanx.data.joined_tokens import PARTS_SUFFIX
from phalanx.data.mds_shards import INDEX_FILE, listed_shards
from phalanx.data.pair_metadata import METADATA_SUFFIX

SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__"}


def walk_visible_files(root: str) -> list[str]:
    """Return the paths of files below a directory, relative to it, except in hidden and skipped folders."""
    names = []
    for folder, subfolders, files in os.walk(root):
        # Walking through all of site-packages would take long.
        subfolders[:] = [name for name in subfolders if _is_visible(name)]
        names += [os.path.relpath(os.path.join(folder, name), root) for name in files]
    return _sort_visible(names)


def select_data_files(names: Iterable[str], root: str, read_file: Callable[[str], bytes], field: str) -> list[str]:
    """Return the names of files with data, relative to `root`; those of a folder stand before its subfolders.

    `read_file` returns the content of a path or URL below `root`. Raises UserError if an index of MDS shards lists one
    that does not exist."""
    folders: dict[str, set[str]] = {}
    visible = _sort_visible(names)
    for name in visible:
        folder, file = os.path.split(name)
        folders.setdefault(folder, set()).add(file)
    metadata = {
        os.path.join(folder, file)
        for folder, files in folders.items()
        for file in _find_metadata(files, os.path.join(root, folder, INDEX_FILE), read_file, field)
    }
    return [name for name in visible if name not in metadata]


def _find_metadata(files: set[str], index_file: str, read_file: Callable[[str], bytes], field: str) -> set[str]:
    """Return names of a folder's files that describe or repeat others: of pairs, saved datasets and MDS shards."""
    prefixes = [name.removesuffix(".idx") for name in files if name.endswith(".idx")]
    metadata = {prefix + end for prefix in prefixes for end in (METADATA_SUFFIX, BAD_RECORDS_SUFFIX, PARTS_SUFFIX)}
    if not files.isdisjoint(SAVED_DATASET_FILES):
        metadata |= {*SAVED_DATASET_FILES, DATASET_INFO_FILE}
    shards = {name for name in files if ".mds" in name}
    listed = listed_shards(read_file(index_file), files, index_file, field) if INDEX_FILE in files else None
    if shards or listed is not None:
        metadata |= {INDEX_FILE, *(shard + suffix for shard in shards for suffix in COMPRESSED_SUFFIXES)}
        metadata |= shards - listed if listed is not None else set()
    return metadata


def _sort_visible(names: Iterable[str]) -> list[str]:
    """Return the names that have no hidden or skipped part, the files of a folder before its subfolders."""
    parts = [name.split("/") for name in names]
    visible = [
        (folders, file) for *folders, file in parts if not file.startswith(".") and all(map(_is_visible, folders))
    ]
    return ["/".join([*folders, file]) for folders, file in sorted(visible)]


def _is_visible(folder: str) -> bool:
    return folder not in SKIPPED_FOLDERS and not folder.startswith(".")

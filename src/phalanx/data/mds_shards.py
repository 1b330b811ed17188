"""MDS shards, the binary format of MosaicML Streaming (https://github.com/mosaicml/streaming).

A shard, little-endian: u32 samples n | u32 offsets [n + 1], in bytes from the start of the file | JSON with the
columns | samples. A sample: u32 sizes of the columns without a fixed size | their values, column after column. An
index.json lists the shards of a folder. Pickled columns are refused, and a shard names no other code or class."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator
from typing import BinaryIO, NamedTuple

import numpy as np

from phalanx.spec.errors import UserError
from phalanx.spec.files.tables import parse_json

INDEX_FILE = "index.json"
PICKLE_ENCODING = "pkl"
VALUE_TYPES = {8: "u1", 9: "i1", 16: "<u2", 17: "<i2", 18: "<f2", 32: "<u4", 33: "<i4", 34: "<f4", 64: "<u8", 65: "<i8"}
"""Types of arrays by their code in a value; 66 is float64, which are no tokens."""
SHAPE_TYPES = ("u1", "<u2", "<u4", "<u8")


class MdsShard(NamedTuple):
    """The header of a shard."""

    offsets: np.ndarray
    """Position of each sample in the file, and the end of the last, int64 [samples + 1]."""
    names: list[str]
    encodings: list[str]
    sizes: list[int | None]
    """Bytes of the values of each column; None if they vary."""


def listed_shards(index: bytes, files: Collection[str], index_file: str, field: str) -> set[str] | None:
    """Return those of a folder's `files` that its index lists, without compression if both are there.

    None without shards in the index. Raises UserError, reported under `field`, if a shard does not exist."""
    try:
        shards = [shard for shard in parse_json(index)["shards"] if shard["format"] == "mds"]
        names = [[data["basename"] for data in (shard["raw_data"], shard.get("zip_data")) if data] for shard in shards]
    except (ValueError, TypeError, KeyError):
        return None
    listed = set()
    for candidates in names:
        # A name is that of a file in this folder, not a path to anywhere.
        present = [name for name in map(os.path.basename, candidates) if name in files]
        if not present:
            problem = f"lists {candidates[0]}, which does not exist"
            raise UserError(field, index_file, problem, "copy all shards")
        listed.add(present[0])
    return listed or None


def read_header(file: BinaryIO) -> MdsShard:
    """Read the header of a shard from the start of a file. Raises ValueError if it is not one."""
    (num_samples,) = np.frombuffer(_read_exactly(file, 4), "<u4").tolist()
    offsets = np.frombuffer(_read_exactly(file, 4 * (num_samples + 1)), "<u4").astype(np.int64)
    config_bytes = int(offsets[0]) - 4 * (num_samples + 2)
    if config_bytes <= 0 or (np.diff(offsets) < 0).any():
        raise ValueError("it is not an MDS shard")
    config = json.loads(_read_exactly(file, config_bytes))
    try:
        shard = MdsShard(offsets, *(config[f"column_{name}"] for name in ("names", "encodings", "sizes")))
        is_valid = (
            len(shard.names) == len(shard.encodings) == len(shard.sizes)
            and all(isinstance(name, str) for name in (*shard.names, *shard.encodings))
            and all(size is None or isinstance(size, int) for size in shard.sizes)
        )
    except (KeyError, TypeError):
        is_valid = False
    if not is_valid:
        raise ValueError("it is not an MDS shard")
    return shard


def read_column(file: BinaryIO, shard: MdsShard, name: str) -> Iterator[bytes]:
    """Yield the values of a column, sample after sample. Raises ValueError if the shard is damaged."""
    column = shard.names.index(name)
    num_sizes = shard.sizes.count(None)
    for sample_bytes in np.diff(shard.offsets).tolist():
        sample = _read_exactly(file, sample_bytes)
        varying = iter(np.frombuffer(sample[: 4 * num_sizes], "<u4").tolist())
        sizes = [next(varying, 0) if size is None else size for size in shard.sizes]
        if 4 * num_sizes + sum(sizes) != sample_bytes:
            raise ValueError("the sizes of a sample's columns do not add up")
        start = 4 * num_sizes + sum(sizes[:column])
        yield sample[start : start + sizes[column]]


def decode_array(value: bytes, encoding: str) -> np.ndarray:
    """Return an array of encoding `ndarray`, `ndarray:TYPE` or `ndarray:TYPE:SHAPE`, as one row.

    Raises ValueError if the bytes do not fit."""
    _, _, arguments = encoding.partition(":")
    type_name, _, shape = arguments.partition(":")
    try:
        if type_name:
            dtype = np.dtype(type_name).newbyteorder("<")
        else:
            dtype = np.dtype(VALUE_TYPES[value[0]])
            value = value[1:]
        if not shape:
            num_dimensions, shape_type = divmod(value[0], 4)
            value = value[1 + num_dimensions * np.dtype(SHAPE_TYPES[shape_type]).itemsize :]
    except (KeyError, IndexError, TypeError):
        raise ValueError("it is not an array of integers") from None
    if dtype.kind not in "iu":
        raise ValueError(f"it has values of type {dtype.name}, but tokens are integers")
    return np.frombuffer(value, dtype)


def _read_exactly(file: BinaryIO, size: int) -> bytes:
    content = file.read(size)
    if len(content) < size:
        raise ValueError("it is truncated")
    return content

"""Tensors in the files of a checkpoint, of which only the parts that are used are read."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import EllipsisType
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from phalanx.train.checkpoint.state import damaged_weights_error, read_tensor_metadata
from phalanx.train.checkpoint.stored_reader import StoredCheckpointReader, open_checkpoint


class Chunk(NamedTuple):
    """A part of a tensor, in one file."""

    file: str
    offsets: tuple[int, ...]
    """Its first index on each axis of the full tensor."""
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class StoredTensor:
    """A full tensor in files. An index reads a part: a row, a range of rows, or everything (`...`)."""

    name: str
    """Its name in the files."""
    shape: torch.Size
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]
    checkpoint: Path
    read_slice: Callable[[str, str], Any]
    """Returns a tensor in a file, by its name, of which parts are read."""

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: int | slice | EllipsisType) -> Tensor:
        """Read a part. Raises UserError if the files do not contain all of it."""
        if isinstance(index, int):
            return self[index : index + 1][0]
        ranges = [range(size) for size in self.shape]
        if isinstance(index, slice):
            ranges[0] = ranges[0][index]
        part = torch.empty([len(wanted) for wanted in ranges], dtype=self.dtype)
        num_read = 0
        for file, offsets, sizes in self.chunks:
            common = [
                range(max(wanted.start, offset), min(wanted.stop, offset + size))
                for wanted, offset, size in zip(ranges, offsets, sizes, strict=True)
            ]
            if not all(common):
                continue
            in_file = tuple(slice(r.start - offset, r.stop - offset) for r, offset in zip(common, offsets, strict=True))
            in_part = tuple(
                slice(r.start - wanted.start, r.stop - wanted.start) for r, wanted in zip(common, ranges, strict=True)
            )
            try:
                part[in_part] = self.read_slice(file, self.name)[in_file]
            except (SafetensorError, OSError) as error:
                raise damaged_weights_error(self.checkpoint, error) from None
            num_read += prod(map(len, common))
        if num_read != part.numel():
            raise damaged_weights_error(self.checkpoint, ValueError(f"parts of {self.name} are missing"))
        return part


def open_tensors(checkpoint: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a checkpoint by name, before any of them is read. Raises UserError for damaged headers."""
    reader = open_checkpoint(checkpoint)
    saved = read_tensor_metadata(reader, checkpoint)
    read_slice: Callable[[str, str], Any]
    if isinstance(reader, StoredCheckpointReader):
        read_slice = reader.stored_slice
    else:
        read_slice = _read_local_slice({str(file) for _, files in saved.values() for file in files})
    tensors = {}
    for name, (metadata, files) in saved.items():
        chunks = tuple(
            Chunk(str(file), tuple(chunk.offsets), tuple(chunk.sizes))
            for chunk, file in zip(metadata.chunks, files, strict=True)
        )
        tensors[name] = StoredTensor(name, metadata.size, metadata.properties.dtype, chunks, checkpoint, read_slice)
    return tensors


def _read_local_slice(files: Iterable[str]) -> Callable[[str, str], Any]:
    """Return the function of one of these files and a name that returns a tensor there."""
    # All at once: small allocations between those of large parts would keep their memory from being used again.
    opened = {file: safe_open(file, framework="pt") for file in files}
    return lambda file, name: opened[file].get_slice(name)

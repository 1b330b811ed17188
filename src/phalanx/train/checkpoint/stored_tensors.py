"""Tensors in the files of a checkpoint, of which only the parts that are used are read."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import EllipsisType
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from phalanx.train.checkpoint.chunked_tensor import Chunk, ChunkedTensor, MissingPartsError
from phalanx.train.checkpoint.state import damaged_weights_error, read_tensor_metadata
from phalanx.train.checkpoint.stored_reader import StoredCheckpointReader, open_checkpoint


@dataclass(frozen=True)
class StoredTensor(ChunkedTensor[str]):
    """A full tensor in files, which are the places of its chunks, under the same name."""

    checkpoint: Path
    read_slice: Callable[[str, str], Any]
    """Returns a tensor in a file, by its name, of which parts are read."""

    def __getitem__(self, index: int | slice | EllipsisType) -> Tensor:
        """Read a part. Raises UserError if the files do not contain all of it."""
        try:
            return super().__getitem__(index)
        except (SafetensorError, OSError, MissingPartsError) as error:
            raise damaged_weights_error(self.checkpoint, error) from None

    def read_chunk(self, chunk: Chunk[str], index: tuple[slice, ...]) -> Tensor:
        """Read a part of a chunk."""
        part: Tensor = self.read_slice(chunk.place, self.name)[index]
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

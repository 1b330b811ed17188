"""Full tensors whose chunks are in different places, of which only the parts that are used are read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import prod
from types import EllipsisType
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

Place = TypeVar("Place")


class Chunk(NamedTuple, Generic[Place]):
    """A part of a tensor, in one place."""

    place: Place
    offsets: tuple[int, ...]
    """Its first index on each axis of the full tensor."""
    sizes: tuple[int, ...]


class MissingPartsError(ValueError):
    """The chunks of a tensor do not contain all of it."""


@dataclass(frozen=True)
class ChunkedTensor(ABC, Generic[Place]):
    """A full tensor in chunks. An index reads a part: a row, a range of rows, or everything (`...`)."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    chunks: tuple[Chunk[Place], ...]

    @property
    def device(self) -> torch.device:
        """Device of the parts that are read."""
        return torch.device("cpu")

    def __len__(self) -> int:
        return self.shape[0]

    @abstractmethod
    def read_chunk(self, chunk: Chunk[Place], index: tuple[slice, ...]) -> Tensor:
        """Read a part of a chunk."""

    def __getitem__(self, index: int | slice | EllipsisType) -> Tensor:
        """Read a part; raises MissingPartsError if the chunks do not contain all of it."""
        if isinstance(index, int):
            return self[index : index + 1][0]
        ranges = [range(size) for size in self.shape]
        if isinstance(index, slice):
            ranges[0] = ranges[0][index]
        part = torch.empty([len(wanted) for wanted in ranges], dtype=self.dtype, device=self.device)
        num_read = 0
        for chunk in self.chunks:
            common = [
                range(max(wanted.start, offset), min(wanted.stop, offset + size))
                for wanted, offset, size in zip(ranges, chunk.offsets, chunk.sizes, strict=True)
            ]
            if not all(common):
                continue
            in_chunk, in_part = (
                tuple(slice(r.start - first, r.stop - first) for r, first in zip(common, firsts, strict=True))
                for firsts in (chunk.offsets, [wanted.start for wanted in ranges])
            )
            part[in_part] = self.read_chunk(chunk, in_chunk)
            num_read += prod(map(len, common))
        if num_read != part.numel():
            raise MissingPartsError(f"parts of {self.name} are missing")
        return part

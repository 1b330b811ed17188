"""Files of tensors that are read and written piece by piece, so that no model need be in memory: safetensors.

A file is 8 bytes of its header's length, the header as JSON, and the numbers of one tensor after the other."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from phalanx.cost.exact.parameter_shapes import Shape
from phalanx.swarm.codec import Buffer, encode
from phalanx.swarm.pieces import ModelPiece

DTYPES = {"F32": torch.float32, "U8": torch.uint8}
HEADER_BYTES = 8
ALIGNED = 8


class TensorFileError(ValueError):
    """A file that is not what it should be."""


class TensorFile:
    """An open file. Pieces are read and written by their place: what is read is a copy."""

    def __init__(self, path: Path, writable: bool = False) -> None:
        """Raises TensorFileError for what is no such file, or has other numbers than F32 and U8."""
        try:
            with safe_open(path, framework="pt"):  # it checks every length and place in the header
                pass
            self._file = os.open(path, os.O_RDWR if writable else os.O_RDONLY)
            length = int.from_bytes(os.pread(self._file, HEADER_BYTES, 0), "little")
            header = json.loads(os.pread(self._file, length, HEADER_BYTES))
        except (SafetensorError, OSError, ValueError) as error:
            raise TensorFileError(f"{path.name} is no safetensors file: {error}") from None
        self.path = path
        header.pop("__metadata__", None)
        self._begin = HEADER_BYTES + length
        self._places = {
            name: (entry["dtype"], tuple(entry["shape"]), *entry["data_offsets"]) for name, entry in header.items()
        }
        if others := {dtype for dtype, *_ in self._places.values()} - set(DTYPES):
            os.close(self._file)
            raise TensorFileError(f"{path.name} has tensors of {', '.join(sorted(others))}")

    @classmethod
    def create(cls, path: Path, shapes: Mapping[str, Shape], dtype: str = "F32") -> Self:
        """A new file, of zeros."""
        header, size = _header(shapes, dtype)
        with path.open("wb") as file:
            file.write(header)
            file.truncate(size)
        return cls(path, writable=True)

    @classmethod
    def recreate(cls, path: Path, shapes: Mapping[str, Shape], dtype: str = "F32") -> Self:
        """A file of these tensors, for a caller that writes all of their numbers: the one that is there with what is in
        it, if it has the same tensors, for its memory need not be found anew; else a new one."""
        header, size = _header(shapes, dtype)
        if path.exists() and path.stat().st_size == size:
            with path.open("rb") as file:
                if file.read(len(header)) == header:
                    return cls(path, writable=True)
        return cls.create(path, shapes, dtype)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Nothing more is read or written."""
        os.close(self._file)

    def sync(self) -> None:
        """Have all that was written on the disk."""
        os.fsync(self._file)

    @cached_property
    def shapes(self) -> dict[str, Shape]:
        """Of all tensors, by name."""
        return {name: shape for name, (_, shape, _, _) in self._places.items()}

    def raw(self, name: str) -> bytearray:
        """A whole tensor's bytes."""
        return self._read(*self.place(name))

    def read(self, item: ModelPiece) -> Tensor:
        """A piece of a model, in fp32."""
        return torch.frombuffer(self._read(*self._piece(item)), dtype=torch.float32).reshape(item.shape)

    def whole(self, name: str) -> Tensor:
        """A whole tensor, in fp32."""
        shape = self._places[name][1]
        return torch.frombuffer(self.raw(name), dtype=torch.float32).reshape(shape)

    def write(self, item: ModelPiece, tensor: Tensor) -> None:
        """Put a piece of a model in its place."""
        begin, size = self._piece(item)
        self._write(begin, encode(tensor, "fp32"), size)

    def read_at(self, place: int, size: int) -> bytes:
        """Bytes of the file, at most 2 GiB; less at its end."""
        return os.pread(self._file, size, place)

    def write_at(self, place: int, data: Buffer) -> None:
        """Put bytes in their place in the file."""
        self._write(place, data, len(data))

    def write_raw(self, name: str, data: Buffer) -> None:
        """Put a whole tensor's bytes in their place."""
        begin, size = self.place(name)
        self._write(begin, data, size)

    def place(self, name: str) -> tuple[int, int]:
        """Where a tensor begins in the file, and how many bytes it has."""
        _, _, begin, end = self._places[name]
        return self._begin + begin, end - begin

    def _piece(self, item: ModelPiece) -> tuple[int, int]:
        begin, size = self.place(item.name)
        each, first = size // self._places[item.name][1][0], item.expert if item.first is None else item.first
        if first is None:
            return begin, size
        return begin + first * each, each * (item.shape[0] if item.first is not None else 1)

    def _read(self, begin: int, size: int) -> bytearray:
        data, done = bytearray(size), 0
        while done < size:  # a call reads no more than 2 GiB
            more = os.preadv(self._file, [memoryview(data)[done:]], begin + done)
            if not more:
                raise TensorFileError(f"{self.path.name} ends too early")
            done += more
        return data

    def _write(self, begin: int, data: Buffer, size: int) -> None:
        if len(data) != size:
            raise TensorFileError(f"{len(data)} bytes do not fit a place of {size} in {self.path.name}")
        view = memoryview(data)
        while view:
            written = os.pwrite(self._file, view, begin)
            begin, view = begin + written, view[written:]


def _header(shapes: Mapping[str, Shape], dtype: str) -> tuple[bytes, int]:
    """What a file of these tensors begins with, and how many bytes it has."""
    end, entries = 0, {}
    for name, shape in shapes.items():
        begin, end = end, end + torch.Size(shape).numel() * DTYPES[dtype].itemsize
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNED)
    return len(text).to_bytes(HEADER_BYTES, "little") + text, HEADER_BYTES + len(text) + end

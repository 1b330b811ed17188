"""Safetensors files that are read and written piece by piece, for models larger than the memory.

A file contains the length of its header in 8 bytes, the header as JSON, and the tensors one after the other.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from phalanx.spec.parts.operations import Shape
from phalanx.swarm.codec import Buffer, encode
from phalanx.swarm.pieces import ModelPiece

DTYPES = {"F32": torch.float32, "U8": torch.uint8}
HEADER_BYTES = 8
ALIGNMENT_BYTES = 8
CHUNK_BYTES = 2**20


class TensorFileError(ValueError):
    """A file with an invalid format or content."""


class TensorFile:
    """An open file. Reads return copies."""

    def __init__(self, path: Path, writable: bool = False) -> None:
        """Open a file.

        Raises TensorFileError if the file is not a valid safetensors file, or has other types than F32 and U8. Raises
        OSError if the file cannot be opened, which says nothing about its content.
        """
        self._file = os.open(path, os.O_RDWR if writable else os.O_RDONLY)
        try:
            # `safe_open` checks every length and position in the header.
            with safe_open(path, framework="pt"):
                pass
            header_bytes = int.from_bytes(os.pread(self._file, HEADER_BYTES, 0), "little")
            header = json.loads(os.pread(self._file, header_bytes, HEADER_BYTES))
        except OSError:
            os.close(self._file)
            raise
        except (SafetensorError, ValueError) as error:
            os.close(self._file)
            raise TensorFileError(f"{path.name} is not a valid safetensors file: {error}") from None
        self.path = path
        header.pop("__metadata__", None)
        self._data_offset = HEADER_BYTES + header_bytes
        self._entries = {
            name: (entry["dtype"], tuple(entry["shape"]), *entry["data_offsets"]) for name, entry in header.items()
        }
        if unknown_dtypes := {dtype for dtype, *_ in self._entries.values()} - set(DTYPES):
            os.close(self._file)
            raise TensorFileError(f"{path.name} has tensors of {', '.join(sorted(unknown_dtypes))}")

    @classmethod
    def create(cls, path: Path, shapes: Mapping[str, Shape], dtype: str = "F32") -> Self:
        """Create a file of zeros."""
        header, size = _build_header(shapes, dtype)
        with path.open("wb") as file:
            file.write(header)
            file.truncate(size)
        return cls(path, writable=True)

    @classmethod
    def recreate(cls, path: Path, shapes: Mapping[str, Shape], dtype: str = "F32") -> Self:
        """Open a file of these tensors whose caller writes all elements.

        An existing file with the same tensors is reused with its content, which saves allocating its memory again.
        """
        header, size = _build_header(shapes, dtype)
        if path.exists() and path.stat().st_size == size:
            with path.open("rb") as file:
                if file.read(len(header)) == header:
                    return cls(path, writable=True)
        return cls.create(path, shapes, dtype)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def sync(self) -> None:
        """Flush all written data to disk."""
        os.fsync(self._file)

    @cached_property
    def shapes(self) -> dict[str, Shape]:
        """The shape of each tensor by name."""
        return {name: shape for name, (_, shape, _, _) in self._entries.items()}

    def raw(self, name: str) -> bytearray:
        """Return the bytes of a tensor."""
        return self._read_bytes(*self.locate(name))

    def read(self, piece: ModelPiece) -> Tensor:
        """Return a piece of a model in fp32."""
        return torch.frombuffer(self._read_bytes(*self._locate_piece(piece)), dtype=torch.float32).reshape(piece.shape)

    def read_tensor(self, name: str) -> Tensor:
        """Return a tensor in fp32."""
        shape = self._entries[name][1]
        return torch.frombuffer(self.raw(name), dtype=torch.float32).reshape(shape)

    def write(self, piece: ModelPiece, tensor: Tensor) -> None:
        """Write a piece of a model."""
        start, size = self._locate_piece(piece)
        self._write_bytes(start, encode(tensor, "fp32"), size)

    def read_at(self, offset: int, size: int) -> bytes:
        """Return bytes of the file, at most 2 GiB, fewer at its end."""
        return os.pread(self._file, size, offset)

    def write_at(self, offset: int, data: Buffer) -> None:
        """Write bytes at a position in the file."""
        self._write_bytes(offset, data, len(data))

    def write_raw(self, name: str, data: Buffer) -> None:
        """Write the bytes of a tensor."""
        start, size = self.locate(name)
        self._write_bytes(start, data, size)

    def locate(self, name: str) -> tuple[int, int]:
        """Return the position of a tensor in the file, and its number of bytes."""
        _, _, start, end = self._entries[name]
        return self._data_offset + start, end - start

    def digest(self, names: Iterable[str]) -> str:
        """Return the checksum of the bytes of tensors, one tensor after the other."""
        checksum = xxhash.xxh3_128()
        for name in names:
            start, size = self.locate(name)
            for offset in range(start, start + size, CHUNK_BYTES):
                checksum.update(self.read_at(offset, min(CHUNK_BYTES, start + size - offset)))
        return checksum.hexdigest()

    def _locate_piece(self, piece: ModelPiece) -> tuple[int, int]:
        start, size = self.locate(piece.name)
        row_bytes = size // self._entries[piece.name][1][0]
        row = piece.expert if piece.first_row is None else piece.first_row
        if row is None:
            return start, size
        return start + row * row_bytes, row_bytes * (piece.shape[0] if piece.first_row is not None else 1)

    def _read_bytes(self, start: int, size: int) -> bytearray:
        data = bytearray(size)
        num_read = 0
        # A single call reads at most 2 GiB.
        while num_read < size:
            count = os.preadv(self._file, [memoryview(data)[num_read:]], start + num_read)
            if not count:
                raise TensorFileError(f"{self.path.name} is truncated")
            num_read += count
        return data

    def _write_bytes(self, start: int, data: Buffer, size: int) -> None:
        if len(data) != size:
            raise TensorFileError(f"{len(data)} bytes do not match the size {size} of the target in {self.path.name}")
        view = memoryview(data)
        while view:
            written = os.pwrite(self._file, view, start)
            start += written
            view = view[written:]


def _build_header(shapes: Mapping[str, Shape], dtype: str) -> tuple[bytes, int]:
    """Return the header of a file with these tensors, and the size of the file."""
    end = 0
    entries = {}
    for name, shape in shapes.items():
        start = end
        end = start + torch.Size(shape).numel() * DTYPES[dtype].itemsize
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT_BYTES)
    return len(text).to_bytes(HEADER_BYTES, "little") + text, HEADER_BYTES + len(text) + end

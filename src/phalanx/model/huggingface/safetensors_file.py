"""Safetensors files that are written one piece of a tensor at a time: the library takes all tensors of a file at once.

The format is a header in JSON with the place of each tensor, and their numbers
(https://huggingface.co/docs/safetensors)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16"}


BUFFER_NUMBERS = 2**20
"""Number of values that are converted and written at a time."""


class FileTensor(NamedTuple):
    """A tensor to write, whose pieces are read when they are written."""

    dtype: torch.dtype
    shape: torch.Size
    pieces: Callable[[], Iterable[Tensor]]
    """Function that returns its numbers, in order, in any dtype."""

    @property
    def num_bytes(self) -> int:
        """Size of the tensor in the file."""
        return prod(self.shape) * self.dtype.itemsize


def write_safetensors(file: Path, tensors: Mapping[str, FileTensor]) -> None:
    """Write a file, with one piece of a tensor in memory. Raises OSError if it cannot be written."""
    # Tensors of larger numbers first, so that all numbers are aligned.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in ordered:
        begin = end
        end += tensor.num_bytes
        dtype = DTYPE_NAMES[tensor.dtype]
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    # One buffer for all, because large ones that are allocated again fragment the memory.
    buffers = {dtype: torch.empty(BUFFER_NUMBERS, dtype=dtype) for dtype in DTYPE_NAMES}
    with open(file, "wb") as opened:
        opened.write(len(text).to_bytes(8, "little") + text)
        for name, tensor in ordered:
            begin = opened.tell()
            for piece in tensor.pieces():
                for numbers in piece.detach().flatten().split(BUFFER_NUMBERS):
                    converted = buffers[tensor.dtype][: len(numbers)].copy_(numbers)
                    opened.write(converted.view(torch.uint8).numpy().data)
            assert opened.tell() - begin == tensor.num_bytes, name

"""Tokens of several .bin files as one array; PREFIX.parts.json lists the files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from phalanx.spec.files.tables import parse_json

PARTS_SUFFIX = ".parts.json"


@dataclass(frozen=True)
class TokenFile:
    """A range of the tokens in a .bin file."""

    path: str
    dtype: str
    first: int
    """Position of the first token in the file."""
    size: int
    """Number of tokens."""


def read_token_files(prefix: str) -> list[TokenFile]:
    """Return the files that `write_token_files` listed."""
    return [TokenFile(**entry) for entry in parse_json(Path(f"{prefix}{PARTS_SUFFIX}").read_bytes())]


def write_token_files(prefix: str | Path, files: Sequence[TokenFile]) -> None:
    """List the files of a joined pair in PREFIX.parts.json, in order."""
    Path(f"{prefix}{PARTS_SUFFIX}").write_text(json.dumps([asdict(file) for file in files], indent=1))


class JoinedTokens:
    """An array [tokens] over several files, for reading by slices and by arrays of positions.

    `maps` are the memory-mapped tokens of each file, whose dtypes fit into `dtype`."""

    def __init__(self, files: Sequence[TokenFile], maps: Sequence[np.ndarray], dtype: np.dtype) -> None:
        self.files = files
        self.maps = maps
        self.dtype = dtype
        self.starts = np.cumsum([0, *(file.size for file in files)])

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getitem__(self, index: slice | np.ndarray) -> np.ndarray:
        return self.take(np.arange(*index.indices(len(self))) if isinstance(index, slice) else index)

    def take(self, positions: np.ndarray) -> np.ndarray:
        """Return the tokens at positions."""
        file_index = np.searchsorted(self.starts, positions, side="right") - 1
        tokens = np.empty(positions.shape, self.dtype)
        for number in np.unique(file_index):
            is_here = file_index == number
            tokens[is_here] = self.maps[number][positions[is_here] - self.starts[number]]
        return tokens

    def files_between(self, first: int, last: int) -> list[TokenFile]:
        """Return the files and ranges of the tokens from position `first` up to `last`."""
        files = []
        for file, start in zip(self.files, self.starts, strict=False):
            lower = max(first, int(start))
            upper = min(last, int(start) + file.size)
            if lower < upper:
                files.append(replace(file, first=file.first + lower - int(start), size=upper - lower))
        return files

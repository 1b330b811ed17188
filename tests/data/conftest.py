"""Small corpora and token files, made once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from phalanx.data.indexed_dataset import IndexedDataset, IndexedWriter

WriteTokens = Callable[[Sequence[Sequence[int]]], IndexedDataset]


@pytest.fixture
def write_tokens(tmp_path: Path) -> WriteTokens:
    """Documents of ids as a dataset."""

    def write(documents: Sequence[Sequence[int]]) -> IndexedDataset:
        with IndexedWriter(tmp_path / "tokens", np.dtype(np.uint16)) as writer:
            for ids in documents:
                writer.add(np.array(ids, np.int64))
        return IndexedDataset(tmp_path / "tokens")

    return write


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A directory of forty Python-like files, in two folders, and things that are not text."""
    root = tmp_path / "corpus"
    for number in range(40):
        file = root / f"part{number % 2}" / f"file{number:02}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"def function_{number}(x):\n    return x + {number}\n" * (number % 7 + 1))
    (root / "picture.png").write_bytes(b"\x89PNG\0\0\0")
    (root / ".hidden").write_text("not read")
    return root

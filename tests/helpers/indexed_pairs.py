"""Pairs of token files."""

from __future__ import annotations

import numpy as np

from phalanx.data.indexed_dataset import IndexedWriter


def write_indexed_pair(path, ids, vocab=257):
    with IndexedWriter(path, np.dtype(np.uint16 if vocab < 65_500 else np.int32)) as writer:
        for document in ids:
            writer.add(np.array(document))
    return str(path)

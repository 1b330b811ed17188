"""Plans with all their layouts, and what a browser does with packed columns, in numpy."""

from __future__ import annotations

import base64
import json
import zlib
from functools import cache
from typing import Any

import numpy as np

from phalanx.report.explorer.exploration import Exploration, explore
from tests.helpers.planned_runs import make_run

NUM_FIRST_CHOICES = 5


@cache
def small_exploration() -> Exploration:
    """Llama 3 8B on two nodes with a small batch: 3,000 layouts, some of them pipelines."""
    run = make_run(sequences=16, cluster={"nodes": 2})
    return explore(run, run.cluster.ranks, NUM_FIRST_CHOICES)


def unpack_columns(packed: dict[str, Any]) -> dict[str, list[Any]]:
    """Return the columns that `pack_columns` packed."""
    raw = zlib.decompress(base64.b64decode(packed["data"]))
    rows, offset, columns = packed["rows"], 0, {}
    for name, width in [*((name, 2) for name in packed["choices"]), *((name, 4) for name in packed["numbers"])]:
        planes = np.frombuffer(raw, np.uint8, width * rows, offset).reshape(width, rows)
        numbers = np.ascontiguousarray(planes.T).view("<u2" if width == 2 else "<f4").ravel()
        values = packed["choices"].get(name)
        columns[name] = numbers.tolist() if values is None else [values[index] for index in numbers]
        offset += width * rows
    assert offset == len(raw)
    return columns


def unpack_json(text: str) -> Any:
    """Return what `pack_json` packed."""
    return json.loads(zlib.decompress(base64.b64decode(text)))

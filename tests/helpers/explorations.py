"""Plans with all their layouts, and the unpacking of columns that a browser does, in numpy."""

from __future__ import annotations

import base64
import json
import zlib
from functools import cache
from typing import Any

import numpy as np

from phalanx.report.explorer.exploration import Exploration, explore
from phalanx.spec.resolved_run import ResolvedRun
from tests.helpers.planned_runs import make_run

NUM_FIRST_CHOICES = 5


@cache
def small_exploration() -> Exploration:
    """Return a plan of Llama 3 8B on two nodes with a small batch: 3,000 layouts, some of them pipelines."""
    run = make_run(sequences=16, cluster={"nodes": 2})
    return explore(ResolvedRun(run, run.cluster.ranks), NUM_FIRST_CHOICES)


def unpack_columns(packed: dict[str, Any]) -> tuple[dict[str, list[Any]], dict[str, list[float]]]:
    """Return the choices and the numbers that `pack_columns` packed."""
    raw, rows = zlib.decompress(base64.b64decode(packed["data"])), packed["rows"]

    def numbers_at(offset: int, kind: str, width: int) -> list[Any]:
        planes = np.frombuffer(raw, np.uint8, width * rows, offset).reshape(width, rows)
        return np.ascontiguousarray(planes.T).view(kind).ravel().tolist()

    choices = {
        name: [values[index] for index in numbers_at(2 * rows * column, "<u2", 2)]
        for column, (name, values) in enumerate(packed["choices"].items())
    }
    start = 2 * rows * len(choices)
    numbers = {name: numbers_at(start + 4 * rows * column, "<f4", 4) for column, name in enumerate(packed["numbers"])}
    assert len(raw) == start + 4 * rows * len(numbers)
    return choices, numbers


def unpack_json(text: str) -> Any:
    """Return what `pack_json` packed."""
    return json.loads(zlib.decompress(base64.b64decode(text)))

"""Files with the measurements of each rank in one step (`--profile-memory`).

The measurements are memory by part, and every collective.

RUN_DIR/measured/rank-00000.json      the measurements of a rank
RUN_DIR/measured/comparison.json      predictions and measurements
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from phalanx.runs.problems import Problem

MEASURED_DIR = "measured"
COMPARISON_FILE = "comparison.json"


def measured_file(directory: Path, rank: int) -> Path:
    """Return the file to which a rank writes its measurements."""
    return directory / MEASURED_DIR / f"rank-{rank:05d}.json"


def write_measured(directory: Path, rank: int, measured: dict[str, Any]) -> None:
    """Write the measurements of a rank.

    Args:
        directory: The run directory.
        rank: The rank.
        measured: Memory by part, in bytes, and the collectives.
    """
    file = measured_file(directory, rank)
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(measured, indent=1))


def read_measured(directory: Path) -> list[dict[str, Any]]:
    """Return the measurements of each rank, in rank order."""
    return [json.loads(file.read_text()) for file in sorted((directory / MEASURED_DIR).glob("rank-*.json"))]


def read_measured_since(
    directory: Path, resumed_at_step: int, world_size: int, problems: list[Problem]
) -> dict[int, dict[str, Any]]:
    """Return the measurements of each rank since the last start.

    Args:
        directory: The run directory.
        resumed_at_step: The step that the last start continued from.
        world_size: The number of ranks of the last start; 0 if unknown.
        problems: A list to which unreadable files are added.
    """
    measured_by_rank = {}
    for file in sorted((directory / MEASURED_DIR).glob("rank-*.json")):
        try:
            measured = json.loads(file.read_text(errors="replace"))
        except ValueError:
            measured = None
        if isinstance(measured, dict) and {"held_bytes", "peak_bytes", "collectives"} <= set(measured):
            rank = int(file.stem.removeprefix("rank-"))
            if measured.get("step", resumed_at_step + 1) > resumed_at_step and rank < (world_size or rank + 1):
                measured_by_rank[rank] = measured
        else:
            problems.append(Problem("unreadable file", {"file": f"{MEASURED_DIR}/{file.name}"}))
    return measured_by_rank

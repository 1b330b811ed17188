"""Write and read what each rank measured in one step: memory by part, and every collective (`--profile-memory`).

RUN_DIR/measured/rank-00000.json      of each rank
RUN_DIR/measured/comparison.json      predicted and measured"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MEASURED_DIR = "measured"
COMPARISON_FILE = "comparison.json"


def measured_file(directory: Path, rank: int) -> Path:
    """Return the file in which a rank of a run writes what it measured."""
    return directory / MEASURED_DIR / f"rank-{rank:05d}.json"


def write_measured(directory: Path, rank: int, measured: dict[str, Any]) -> None:
    """Write what a rank measured."""
    file = measured_file(directory, rank)
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(measured, indent=1))


def read_measured(directory: Path) -> list[dict[str, Any]]:
    """Return what each rank measured, in the order of ranks."""
    return [json.loads(file.read_text()) for file in sorted((directory / MEASURED_DIR).glob("rank-*.json"))]


def read_measured_since(
    directory: Path, resumed_at_step: int, world_size: int, problems: list[str]
) -> dict[int, dict[str, Any]]:
    """Return what each rank measured since the last start; files that cannot be read are added to `problems`."""
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
            problems.append(f"{MEASURED_DIR}/{file.name} cannot be read")
    return measured_by_rank

"""Write and read what each rank measured in one step: memory by part, and every collective (`--profile-memory`).

RUN_DIR/measured/rank-00000.json      of each rank
RUN_DIR/measured/comparison.json      predicted and measured"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MEASURED_DIR, COMPARISON_FILE = "measured", "comparison.json"


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

"""Read metrics.jsonl of a run directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MetricsRecord = dict[str, Any]
METRICS_FILE = "metrics.jsonl"


def read_metrics(directory: Path) -> list[MetricsRecord]:
    """All records of a run directory, in order. A number that was not finite is None."""
    return [json.loads(line) for line in read_lines(directory / METRICS_FILE)]


def read_lines(path: Path) -> list[str]:
    """The complete lines of a file; a run that was killed may have left half a line."""
    if not path.exists():
        return []
    return [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]

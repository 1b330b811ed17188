"""Read metrics.jsonl of a run directory, and name the other logs there."""

from __future__ import annotations

from pathlib import Path

from phalanx.runs.jsonl import JsonRecord, read_jsonl

MetricsRecord = JsonRecord
METRICS_FILE, WANDB_ID_FILE, TENSORBOARD_DIR = "metrics.jsonl", "wandb.id", "tensorboard"


def read_metrics(directory: Path) -> list[MetricsRecord]:
    """Return all records of a run directory, in order. A number that was not finite is None."""
    return read_jsonl(directory / METRICS_FILE)

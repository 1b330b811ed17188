"""Read metrics.jsonl of a run directory, and name the other logs there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from phalanx.runs.jsonl import JsonRecord, read_jsonl, read_valid_jsonl
from phalanx.runs.problems import Problem

MetricsRecord = JsonRecord
METRICS_FILE = "metrics.jsonl"
WANDB_ID_FILE = "wandb.id"
TENSORBOARD_DIR = "tensorboard"


def read_metrics(directory: Path, problems: list[Problem] | None = None) -> list[MetricsRecord]:
    """Return all records of a run directory, in order. A number that was not finite is None.

    A missing file and unreadable lines are added to `problems`.
    """
    file = directory / METRICS_FILE
    if problems is None:
        return read_jsonl(file)
    if not file.is_file():
        problems.append(Problem("missing file", {"file": file.name}))
        return []
    return read_valid_jsonl(file, problems)


def have_same_held_out_text(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Return whether two evaluations measured the same tokens in the same way, so that their losses are comparable.

    Records of earlier versions have the number of tokens alone.
    """
    sets = first.get("held_out_set"), second.get("held_out_set")
    return first.get("held_out_tokens") == second.get("held_out_tokens") and (None in sets or sets[0] == sets[1])


def has_ignored_targets(record: MetricsRecord) -> bool:
    """Return whether a step had tokens without a target; the records of earlier versions do not say so."""
    return record.get("targets_per_second", record.get("tokens_per_second")) != record.get("tokens_per_second")


def peak_from_mfu(record: MetricsRecord, flops_per_token: float, ranks: int) -> float | None:
    """Return the peak FLOP/s of one rank to which the MFU of a step's record refers.

    Args:
        record: The record of a step.
        flops_per_token: The model FLOPs of training on one token.
        ranks: The number of ranks of the run.

    Returns:
        The peak, or None if the record has no MFU.
    """
    mfu = record.get("mfu")
    return record["tokens_per_second"] * flops_per_token / ranks / mfu if mfu else None

"""Scores of checkpoints by tasks, in the run directory."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from phalanx.runs.decode import decoder
from phalanx.runs.jsonl import read_valid_jsonl

SCORES_FILE = "scores.jsonl"


@dataclass(frozen=True, kw_only=True)
class Score:
    """A metric of a task."""

    step: int | None
    """Step of the checkpoint; None for the current weights of a swarm."""
    task: str
    metric: str
    value: float
    num_fewshot: int | None = None
    limit: int | None = None
    """Number of questions, if not all were asked."""


def add_scores(
    directory: Path,
    step: int | None,
    results: Mapping[str, Mapping[str, Any]],
    num_fewshot: int | None = None,
    limit: int | None = None,
) -> list[Score]:
    """Append the metrics of tasks, as lm-eval names them, to the scores of a run; return them."""
    scores = [
        Score(step=step, task=task, metric=_name(metric), value=float(value), num_fewshot=num_fewshot, limit=limit)
        for task, metrics in results.items()
        for metric, value in metrics.items()
        if isinstance(value, float | int) and math.isfinite(value) and "_stderr" not in metric and "," in metric
    ]
    with open(directory / SCORES_FILE, "a") as file:
        file.writelines(json.dumps(asdict(score)) + "\n" for score in scores)
    return scores


def _name(metric: str) -> str:
    """Return the name of a metric, with the filter of answers that lm-eval appends, if there is one."""
    name, _, answers = metric.partition(",")
    return name if answers == "none" else f"{name} ({answers})"


def read_scores(directory: Path) -> list[Score]:
    """Return the scores of a run, in the order in which they were measured; damaged lines are left out."""
    return read_valid_jsonl(directory / SCORES_FILE, [], decoder(Score))

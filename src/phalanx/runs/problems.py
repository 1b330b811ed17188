"""Problems of a run directory: data that is missing or cannot be read, and what kept the run from finishing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

ProblemKind = Literal[
    "missing file",
    "unreadable file",
    "unreadable lines",
    "no header",
    "other format",
    "no rank records",
    "record ends early",
    "missing ranks",
    "no rounds",
    "invalid run file",
    "failed",
    "metrics end early",
    "no steps",
    "unfinished",
    "restarted",
    "rolled back",
    "damaged checkpoints",
    "too few steps",
    "no prediction",
    "no verdict",
    "other held-out text",
]


@dataclass(frozen=True)
class Problem:
    """One problem. `report.formatting.format_problem` has its text, and so the names of its values."""

    kind: ProblemKind
    values: Mapping[str, Any] = field(default_factory=dict)


def unreadable_file(file: Path) -> Problem:
    """Return the problem of a damaged or unreadable file in a folder of the run directory."""
    return Problem("unreadable file", {"file": f"{file.parent.name}/{file.name}"})

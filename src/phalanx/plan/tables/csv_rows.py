"""CSV file of a table of runs: its columns, and its rows as text."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path

from phalanx.spec.errors import UserError

Row = Mapping[str, str]
REQUIRED_COLUMNS = ("layers", "hidden", "heads", "ffn", "vocab", "seq", "gpus", "gpu_type", "tp", "pp", "global_batch")
"""Columns that every prediction requires."""
OPTIONAL_COLUMNS = (
    "id",
    "model",
    "params_b",
    "kv_heads",
    "experts",
    "topk",
    "gpus_per_node",
    "intra_bw",
    "inter_bw",
    "vpp",
    "dp",
    "cp",
    "ep",
    "zero",
    "micro_batch",
    "recompute",
    "seq_parallel",
    "precision",
    "schedule",
    "facts",
)
"""Columns that are read if present; all others are ignored."""


def read_rows(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file by column.

    Raises UserError if the file cannot be read, or lacks required columns.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            table = csv.DictReader(file)
            names = table.fieldnames or ()
            rows = list(table)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        fix = "use a CSV file with a header"
        raise UserError("table of runs", str(path), f"cannot be read: {error}", fix=fix) from None
    missing = [column for column in REQUIRED_COLUMNS if column not in names]
    if missing:
        problem = f"does not have the columns {', '.join(missing)}" if names else "is empty"
        known_columns = f"required are {', '.join(REQUIRED_COLUMNS)}; optional are {', '.join(OPTIONAL_COLUMNS)}"
        fix = f"use a CSV file whose first line contains its comma-separated column names: {known_columns}"
        raise UserError("table of runs", str(path), problem, fix=fix)
    return [{column: text or "" for column, text in row.items() if column} for row in rows]

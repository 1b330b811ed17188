"""Scores of checkpoints on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from phalanx.cli.common.text import text_table
from phalanx.report import formatting


def scores_table(scores: Sequence[dict[str, Any]]) -> Table:
    """Return a table of the scores of tasks, as facts of reports have them."""
    (task, metric, *steps), rows = formatting.score_rows(scores)
    table = text_table(task, metric, numbers=steps)
    for row in rows:
        table.add_row(*row)
    return table

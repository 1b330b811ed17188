"""Scores of checkpoints on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from phalanx.cli.common.text import text_table
from phalanx.report import formatting
from phalanx.runs.metrics import MetricsRecord, losses_by_source
from phalanx.spec.formatting import format_perplexity


def held_out_table(record: MetricsRecord, step: int | None) -> Table:
    """Return a table of the losses of an evaluation by source, and of all its targets."""
    table = text_table(f"step {step}", numbers=("loss", "perplexity"))
    for name, loss in losses_by_source(record, "held_out_loss").items():
        table.add_row(name, f"{loss:.4f}", format_perplexity(loss))
    loss = record["held_out_loss"]
    table.add_row(f"all {record['held_out_tokens']:,} targets", f"{loss:.4f}", format_perplexity(loss))
    return table


def scores_table(scores: Sequence[dict[str, Any]]) -> Table:
    """Return a table of the scores of tasks, as facts of reports have them."""
    (task, metric, *steps), rows = formatting.score_rows(scores)
    table = text_table(task, metric, numbers=steps)
    for row in rows:
        table.add_row(*row)
    return table

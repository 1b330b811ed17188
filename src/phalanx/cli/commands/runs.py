"""`phalanx runs`: a table of run directories."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from phalanx.cli.common.options import Json

SORT_FIELDS = {
    "name": "directory",
    "state": "state",
    "step": "step",
    "loss": "loss",
    "validation": "held_out_loss",
    "speed": "tokens_per_second",
    "model": "model",
    "layout": "layout",
    "date": "updated",
}
STATE_STYLES = {
    "running": "cyan",
    "finished": "green",
    "stopped": "yellow",
    "failed": "red",
    "killed": "red",
    "unreadable": "red",
}


def runs(
    directories: Annotated[
        list[Path] | None,
        Argument(help="Directories of runs, or run directories; default: runs.", metavar="DIRECTORY..."),
    ] = None,
    sort: Annotated[str, Option(help=f"Sort by {', '.join(SORT_FIELDS)}.", metavar="COLUMN")] = "date",
    json_: Json = False,
) -> None:
    """List runs: state, step, loss, validation loss, speed of the last 20 steps, model, layout, time of the last step.

    Sorted from the latest, the largest step and speed, or the lowest loss. Runs with missing or damaged files are
    listed with what is known.

    Examples:

        phalanx runs

        phalanx runs --sort validation

        phalanx runs runs/first runs/second other/runs

        phalanx runs --json
    """
    from phalanx.runs.summary import find_runs, sort_summaries, summarize_run
    from phalanx.spec.base import did_you_mean, require
    from phalanx.spec.formatting import UNKNOWN, plural

    require(sort in SORT_FIELDS, "--sort", sort, "is not a column", did_you_mean(sort, list(SORT_FIELDS)))
    directories = directories or [Path("runs")]
    found = [find_runs(directory) for directory in directories]
    summaries = [
        summarize_run(run) for run in dict.fromkeys(run for run_directories, _ in found for run in run_directories)
    ]
    others = [path for _, other_directories in found for path in other_directories]
    rows = list(sort_summaries(summaries, SORT_FIELDS[sort]))
    if json_:
        print(json.dumps({"runs": [asdict(row) for row in rows], "others": others}, indent=2, default=str))
        return

    from rich.table import Column
    from rich.text import Text

    from phalanx.cli.common.text import print_line, text_table
    from phalanx.cli.views.plan import plan_console

    console = plan_console()
    headers = ("step", "loss", "validation", "tokens/s")
    table = text_table(
        Column("run", no_wrap=True),
        Column("state", no_wrap=True),
        *(Column(header, justify="right", no_wrap=True) for header in headers),
        *(Column(header, no_wrap=True) for header in ("model", "layout", "last step")),
    )
    for row in rows:
        losses = (UNKNOWN if loss is None else f"{loss:.4f}" for loss in (row.loss, row.held_out_loss))
        table.add_row(
            str(row.directory),
            Text(row.state, STATE_STYLES.get(row.state, "")),
            f"{row.step:,}/{row.steps:,}" if row.steps else f"{row.step:,}",
            *losses,
            UNKNOWN if row.tokens_per_second is None else f"{row.tokens_per_second:,.0f}",
            row.model or UNKNOWN,
            row.layout or UNKNOWN,
            UNKNOWN if row.updated is None else f"{datetime.fromtimestamp(row.updated):%Y-%m-%d %H:%M}",
        )
    if rows:
        console.print(table)
    for row in rows:
        if row.bad_records:
            print_line(
                console, f"{row.directory}: {plural(row.bad_records, 'broken record')} of the data skipped", "dim"
            )
        if row.finish_reason:
            print_line(console, f"{row.directory}: ended early: {row.finish_reason}", "dim")
        for problem in row.problems:
            print_line(console, f"{row.directory}: {problem}", "dim")
    if others:
        names = ", ".join(path.name for path in others[:8]) + (", ..." if len(others) > 8 else "")
        kind = "directory is not a run" if len(others) == 1 else "directories are not runs"
        print_line(console, f"{len(others)} {kind}: {names}", "dim")
    if not rows:
        print_line(console, f"no run in {', '.join(map(str, directories))}; train one with phalanx train")

"""`phalanx report`: measurements of a run compared with predictions, in the terminal and on a page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from phalanx.cli.common.options import Json, Machine
from phalanx.cli.common.output_file import write_file
from phalanx.spec.errors import UserError

PAGE = "report.html"


def report(
    runs: Annotated[list[Path], Argument(help="Run directories.", metavar="RUN_DIR...")],
    html: Annotated[
        Path | None, Option(help=f"Page to write; default: RUN_DIR/{PAGE}, for several runs ./{PAGE}.", metavar="FILE")
    ] = None,
    trace: Annotated[
        Path | None, Option(help="Write a trace of all ranks, for ui.perfetto.dev.", metavar="FILE.json")
    ] = None,
    machine: Machine = None,
    json_: Json = False,
) -> None:
    """Show where the time of a run went, its bottleneck, and the error of the prediction.

    Prints a summary and writes a self-contained page (with --json only if --html is given). Several runs are compared.
    To see the passes of a step and its memory over time, train with --profile-steps. Predictions are for the machine of
    the run file; --machine selects another description, such as a file by `phalanx calibrate`.

    Examples:

        phalanx report runs/first

        phalanx report runs/first runs/second --html both.html

        phalanx report runs/first --machine here.toml

        phalanx report runs/first --json

        phalanx report runs/first --trace trace.json
    """
    from phalanx.report.compare_runs import report_data
    from phalanx.report.facts import report_facts
    from phalanx.report.html.page import page
    from phalanx.report.run_data import read_run
    from phalanx.runs.create import is_run_directory
    from phalanx.spec.files.load import load_machine

    cluster = load_machine(machine) if machine else None
    run_data = [read_run(directory, cluster) for directory in runs]
    if trace is not None:
        from phalanx.report.export.chrome_trace import chrome_trace

        if len(run_data) > 1:
            raise UserError("--trace", str(trace), f"requires one run, not {len(run_data)}", fix="give one RUN_DIR")
        if not run_data[0].ranks:
            problem = "requires records of the ranks, which this run does not have"
            fix = "train with metrics.per_rank_records = true, and add --profile-steps to record passes and collectives"
            raise UserError("--trace", str(trace), problem, fix=fix)
        write_file("--trace", trace, json.dumps(chrome_trace(run_data[0])))
    facts_of_runs = report_data([report_facts(run) for run in run_data])
    file = html or (runs[0] / PAGE if len(runs) == 1 else Path(PAGE))
    if not json_ and html is None and len(runs) == 1 and not is_run_directory(runs[0]):
        raise UserError("run directory", str(runs[0]), "was not created by phalanx train", fix="add --html FILE")
    # Before any output, which a pager may cut off
    if html or not json_:
        write_file("--html", file, page(facts_of_runs), replaces_link=html is None and len(runs) == 1)
    if json_:
        print(json.dumps(facts_of_runs, indent=2, allow_nan=False))
    else:
        from phalanx.cli.views.report import print_report

        print_report(facts_of_runs, file)

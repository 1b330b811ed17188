"""`phalanx calibrate`: fold measured runs back into the machine's table."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phalanx.cli.options import Json

WIDE = 0.4
"""Half of an interval, as a logarithm, beyond which a calibration says little."""

if TYPE_CHECKING:
    from phalanx.plan.calibrate import Calibration, MeasuredRun


def calibrate(
    runs: Annotated[list[Path], typer.Argument(help="Directories of runs on this machine.", metavar="RUN_DIR ...")],
    machine: Annotated[
        str | None,
        typer.Option(
            help="What is known of the machine: a preset or a file. By default this one's CPU.", metavar="NAME"
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="The machine's file to write.", metavar="FILE")] = Path("machine.toml"),
    json_: Json = False,
) -> None:
    """Fit the planner to runs on your machine: the next plan is about it, not about published ones.

    Any runs of `phalanx train` do, of at least five steps; short ones in different layouts tell most: data, tensor,
    context, pipeline and expert parallelism, small and large micro-batches. Of a step its whole time counts, and how
    long its ranks computed and waited for collectives. What no run decides stays as published.

    Examples:

        phalanx calibrate runs/a runs/b runs/c --out here.toml

        phalanx plan run.toml --machine here.toml --nproc 4

        phalanx calibrate runs/* --machine h100 --out our-h100.toml
    """
    from rich.console import Console

    from phalanx.spec.errors import UserError

    if out.suffix != ".toml":
        raise UserError("--out", str(out), "does not end in .toml, as --machine wants it", "name a .toml file")

    from phalanx.plan.calibrate import calibrate as fit
    from phalanx.plan.calibrate import read_measured_run, this_cpu, write_machine
    from phalanx.report.efficiency import with_parts
    from phalanx.spec.load import load_machine

    measured = [with_parts(read_measured_run(directory), directory) for directory in runs]
    if machine is None and any(run.run.cluster.device == "cuda" for run in measured):
        raise UserError("--machine", None, "is needed for runs on GPUs", "name theirs, such as --machine h100")
    with Console(stderr=True).status(f"constants of {len(runs)} runs, with each left out in turn"):
        found = fit(measured, load_machine(machine) if machine else this_cpu())
    write_machine(out, found.machine, measured)
    if json_:
        import json

        print(json.dumps(facts(measured, found), indent=2))
    else:
        show(measured, found, out)
    if found.machine.measured is not None and found.machine.measured.log_half_width > WIDE:
        fix = "add runs, longer ones, while nothing else uses the machine"
        print(f"{out} predicts too widely to choose by: {fix}", file=sys.stderr)


def facts(runs: list[MeasuredRun], found: Calibration) -> dict[str, Any]:
    """What `--json` prints: predicted beside measured of each run, and the machine."""
    rows = zip(runs, found.before, found.after, found.left_out, found.memory, strict=True)
    return {
        "runs": [
            {
                "name": run.name,
                "step_seconds": run.step_seconds,
                "before_seconds": float(before),
                "after_seconds": float(after),
                "left_out_seconds": float(left_out),
                "memory_bytes": run.memory_bytes,
                "predicted_memory_bytes": float(memory),
            }
            for run, before, after, left_out, memory in rows
        ],
        "machine": found.machine.model_dump(mode="json", exclude_none=True, exclude_defaults=True),
    }


def show(runs: list[MeasuredRun], found: Calibration, out: Path) -> None:
    """Predicted beside measured, and what the runs decide."""
    from math import exp

    from rich.console import Console
    from rich.table import Table

    from phalanx.cost.constants import time_constants
    from phalanx.cost.footprint import GIB

    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("run", no_wrap=True)
    for header in ("step s", "before", "now", "by the others", "GiB", "now"):
        table.add_column(header, justify="right")
    for run, before, after, left_out, memory in zip(
        runs, found.before, found.after, found.left_out, found.memory, strict=True
    ):
        errors = [f"{100 * (seconds / run.step_seconds - 1):+.1f} %" for seconds in (before, after, left_out)]
        held = f"{run.memory_bytes / GIB:.2f}", f"{100 * (memory / run.memory_bytes - 1):+.1f} %"
        table.add_row(run.name, f"{run.step_seconds:.3f}", *errors, *held)
    console = Console()
    console.print(table)
    measured, published = found.machine.measured, time_constants()
    assert measured is not None
    console.print()
    decided = [f"{name} {measured.time.get(name, getattr(published, name)):.4g}" for name in measured.decided]
    lines = [
        "before, now: the plan's error with the constants before, and now; by the others: fitted without that run",
        f"measured now: {', '.join(decided) or 'nothing, the runs are too few or too much alike'}",
        "all others are as on published machines, or between these and the runs",
        f"80 % of steps are expected within {100 * (exp(measured.log_half_width) - 1):.0f} % of a prediction",
        f"wrote {out}: phalanx plan RUN.toml --machine {out}",
    ]
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)

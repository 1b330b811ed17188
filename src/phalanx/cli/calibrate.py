"""`phalanx calibrate`: fold measured runs back into the machine's table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phalanx.cli.options import Json

if TYPE_CHECKING:
    from phalanx.plan.calibrate import Calibration, MeasuredRun
    from phalanx.spec.cluster import Cluster


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
    context, pipeline and expert parallelism, small and large micro-batches. What no run decides stays as published.

    Examples:

        phalanx calibrate runs/a runs/b runs/c --out here.toml

        phalanx plan run.toml --machine here.toml --nproc 4

        phalanx calibrate runs/* --machine h100 --out our-h100.toml
    """
    from rich.console import Console

    from phalanx.plan.calibrate import calibrate as fit
    from phalanx.plan.calibrate import read_measured_run

    measured = [read_measured_run(directory) for directory in runs]
    with Console(stderr=True).status(f"constants of {len(runs)} runs, with each left out in turn"):
        found = fit(measured, known_machine(machine))
    write(out, found.machine, measured)
    if json_:
        import json

        print(json.dumps(facts(measured, found), indent=2))
    else:
        show(measured, found, out)


def known_machine(name: str | None) -> Cluster:
    """A preset, a file, or this machine's CPU."""
    import os

    from phalanx.spec.load import load_machine

    if name is not None:
        return load_machine(name)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return load_machine("cpu").model_copy(update={"cores": os.cpu_count(), "memory_bytes": memory})


def write(file: Path, machine: Cluster, runs: list[MeasuredRun]) -> None:
    """The machine as a file that `--machine` and `cluster.preset` take."""
    import tomli_w

    from phalanx.spec.errors import UserError
    from phalanx.spec.load import cluster_table

    head = f"# By phalanx calibrate, from {', '.join(run.name for run in runs)}.\n"
    try:
        file.write_text(head + tomli_w.dumps(cluster_table(machine)))
    except OSError as error:
        raise UserError("--out", str(file), f"cannot be written: {error.strerror}", "name another file") from None


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
        f"measured now: {', '.join(decided) or 'nothing, the runs are too few or too much alike'}",
        "all others are as on published machines, or between these and the runs",
        f"80 % of steps are expected within {100 * (exp(measured.log_half_width) - 1):.0f} % of a prediction",
        f"wrote {out}: phalanx plan RUN.toml --machine {out}",
    ]
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)

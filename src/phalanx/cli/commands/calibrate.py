"""`phalanx calibrate`: fit a machine's description to measured runs."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from phalanx.cli.common.options import Json
from phalanx.spec.formatting import GIB

MAX_LOG_HALF_WIDTH = 0.4
"""Half-width of an interval, as a logarithm, above which a calibration is uninformative."""

if TYPE_CHECKING:
    from phalanx.plan.calibrate.calibrate import Calibration
    from phalanx.plan.calibrate.measured_run import MeasuredRun


def calibrate(
    found_by: Annotated[
        list[Path],
        Argument(
            help="Run directories from this machine, and result files of `phalanx bench`.",
            metavar="RUN_DIR... [MEASURED.json]...",
        ),
    ],
    machine: Annotated[
        str | None,
        Option(
            help="Starting description of the machine: a preset or a file. Default: this machine's CPU.", metavar="NAME"
        ),
    ] = None,
    out: Annotated[Path, Option(help="Machine file to write.", metavar="FILE")] = Path("machine.toml"),
    json_: Json = False,
) -> None:
    """Fit the planner's constants to runs on your machine, so that plans predict this machine.

    Use runs of `phalanx train` with at least five steps. Short runs in different layouts give the most information:
    data, tensor, context, pipeline and expert parallelism, small and large micro-batches. The fit uses the time of each
    step, and how long its ranks computed and waited for collectives. Profiled steps (--profile-steps) add the time of
    each collective by size and group. Files of `phalanx bench --out` add measured matrix products, attention, memory
    bandwidth and collectives. Constants that the data do not determine keep their published values.

    Examples:

        phalanx calibrate runs/a runs/b runs/c --out here.toml

        phalanx bench run.toml --nproc 2 --sweep 4KiB:16MiB --out measured.json

        phalanx calibrate runs/a runs/b measured.json --out here.toml

        phalanx plan run.toml --machine here.toml --nproc 4

        phalanx calibrate runs/* --machine h100 --out our-h100.toml
    """
    from phalanx.cli.common.output_file import check_replaceable
    from phalanx.spec.errors import UserError
    from phalanx.spec.terminal import Terminal

    if out.suffix != ".toml":
        fix = "use a file name that ends in .toml"
        raise UserError("--out", str(out), "does not end in .toml, which --machine requires", fix=fix)
    check_replaceable("--out", out, "machine file")

    from phalanx.plan.calibrate.calibrate import calibrate as fit
    from phalanx.plan.calibrate.calibrate import detect_cpu, write_machine
    from phalanx.plan.calibrate.microbenchmarks import read_benchmark_file
    from phalanx.report.measured_run import read_measured_run, with_measured_parts
    from phalanx.spec.files.load import load_machine

    runs, files = (
        [path for path in found_by if (path.suffix == ".json") is is_benchmark] for is_benchmark in (False, True)
    )
    if not runs:
        fix = "add the directory of a run of phalanx train; a short run is enough"
        raise UserError("RUN_DIR", None, "is required: benchmarks alone do not determine the time of a step", fix=fix)
    for directory in runs:
        if sum(other.resolve() == directory.resolve() for other in runs) > 1:
            raise UserError("RUN_DIR", str(directory), "is given twice", fix="give each run once")
    measured = [with_measured_parts(read_measured_run(directory), directory) for directory in runs]
    sweeps = [read_benchmark_file(file) for file in files]
    if machine is None and any(run.run.cluster.device == "cuda" for run in measured):
        fix = "give the machine of the runs, such as --machine h100"
        raise UserError("--machine", None, "is required for runs on GPUs", fix=fix)
    with Terminal(stderr=True).status(f"fitting constants to {len(runs)} runs, and cross-validating them"):
        calibration = fit(measured, load_machine(machine) if machine else detect_cpu(), sweeps)
    write_machine(out, calibration.machine, [*(run.name for run in measured), *(sweep.name for sweep in sweeps)])
    if json_:
        import json

        print(json.dumps(calibration_to_json(measured, calibration), indent=2))
    else:
        print_calibration(measured, calibration, out)
    fitted = calibration.machine.calibration
    if fitted is not None and fitted.log_half_width > MAX_LOG_HALF_WIDTH:
        fix = "add longer runs, measured while nothing else uses the machine"
        print(f"the prediction intervals of {out} are too wide to choose a layout: {fix}", file=sys.stderr)


def calibration_to_json(runs: list[MeasuredRun], calibration: Calibration) -> dict[str, Any]:
    """Return the output of `phalanx calibrate --json`: predictions and measurements, and the machine."""
    rows = zip(runs, calibration.before, calibration.after, calibration.leave_one_out, calibration.memory, strict=True)
    return {
        "runs": [
            {
                "name": run.name,
                "step_seconds": run.step_seconds,
                "before_seconds": float(before),
                "after_seconds": float(after),
                "left_out_seconds": float(leave_one_out),
                "memory_bytes": run.memory_bytes,
                "predicted_memory_bytes": float(memory),
            }
            for run, before, after, leave_one_out, memory in rows
        ],
        "operations": [asdict(operations) for operations in calibration.operations],
        "machine": calibration.machine.model_dump(mode="json", exclude_none=True, exclude_defaults=True),
    }


def print_calibration(runs: list[MeasuredRun], calibration: Calibration, out: Path) -> None:
    """Print predictions next to measurements, and the constants that the runs determine; `out` is the written file."""
    from math import exp

    from rich.table import Column

    from phalanx.cli.common.text import print_line, text_table
    from phalanx.cost.estimate.constants import time_constants
    from phalanx.spec.terminal import Terminal

    table = text_table(Column("run", no_wrap=True), numbers=("step s", "before", "now", "by the others", "GiB", "now"))
    for run, before, after, leave_one_out, memory in zip(
        runs, calibration.before, calibration.after, calibration.leave_one_out, calibration.memory, strict=True
    ):
        errors = [f"{100 * (seconds / run.step_seconds - 1):+.1f} %" for seconds in (before, after, leave_one_out)]
        memory_cells = f"{run.memory_bytes / GIB:.2f}", f"{100 * (memory / run.memory_bytes - 1):+.1f} %"
        table.add_row(run.name, f"{run.step_seconds:.3f}", *errors, *memory_cells)
    console = Terminal()
    console.print(table)
    if calibration.operations:
        names = [Column(header, no_wrap=True) for header in ("timed apart", "in")]
        table = text_table(*names, numbers=("how many", "off by, before", "now"))
        for operation in calibration.operations:
            errors = [f"{100 * factor:.0f} %" for factor in (operation.before, operation.after)]
            table.add_row(operation.kind, operation.of, f"{operation.count}", *errors)
        console.print()
        console.print(table)
    measured = calibration.machine.calibration
    published = time_constants()
    assert measured is not None
    console.print()
    decided = [
        f"{name} {measured.time_constants.get(name, getattr(published, name)):.4g}"
        for name in measured.identified_constants
    ]
    lines = [
        "before, now: error of the plan with the old and the fitted constants; by the others: fitted without that run",
        f"determined by these runs: {', '.join(decided) or 'nothing, the runs are too few or too similar'}",
        "all other constants are published values, or between these and the runs",
        f"80 % of steps are expected within {100 * (exp(measured.log_half_width) - 1):.0f} % of a prediction",
        f"wrote {out}: phalanx plan RUN.toml --machine {out}",
    ]
    for line in lines:
        print_line(console, line)

"""`phalanx pipeline`: display, validation and conversion of schedules."""

from __future__ import annotations

import json
import sys
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text
from typer import Argument, Option

from phalanx.cli.commands.pipeline_split import split
from phalanx.cli.common.options import Json
from phalanx.cli.common.output_file import check_replaceable
from phalanx.report.drawing.schedule import COLORS, LEGEND, chrome_trace, draw, kinds, lines
from phalanx.schedule.published import PUBLISHED, active_fraction_per_tick, book_overlap
from phalanx.schedule.registry import build_schedule
from phalanx.schedule.schedule import Schedule, read_csv, to_csv
from phalanx.schedule.search import search_schedule
from phalanx.schedule.simulate import ActionTimes, Timeline, peak_activations, simulate
from phalanx.schedule.validate import lockstep_violations, violations
from phalanx.spec.base import require
from phalanx.spec.errors import UserError
from phalanx.spec.formatting import plural
from phalanx.spec.pipeline_schedules import SCHEDULES
from phalanx.spec.terminal import Terminal

app = typer.Typer(help="Show and check pipeline schedules.", no_args_is_help=True, rich_markup_mode="markdown")
IDEALIZED = "book-overlap"
OUTPUT_SUFFIXES = (".svg", ".png", ".json", ".csv")


@app.command()
def show(
    schedule: Annotated[
        str,
        Argument(help=f"{', '.join(PUBLISHED)}, searched, {IDEALIZED} (idealised), or a .csv file."),
    ],
    stages: Annotated[int | None, Option(help="Pipeline ranks.", min=1, metavar="P")] = None,
    microbatches: Annotated[int | None, Option(help="Micro-batches of a step.", min=1, metavar="M")] = None,
    times: Annotated[
        str,
        Option(
            help="Times of a micro-batch on a rank, in any unit: forward pass, gradient of the input, gradient of the "
            "weights, transfer to the next rank.",
            metavar="F,B,W,COMM",
        ),
    ] = "1,1,1,0",
    virtual_stages: Annotated[
        int | None, Option(help="Stages per rank (interleaved); default: 2.", min=1, metavar="V")
    ] = None,
    memory: Annotated[
        float | None, Option(help="Maximum micro-batches in flight per rank (searched); default: P.", metavar="N")
    ] = None,
    out: Annotated[
        list[Path] | None,
        Option(help="File to write: .svg, .png, .json (trace for ui.perfetto.dev) or PyTorch's .csv; repeatable."),
    ] = None,
    json_: Json = False,
) -> None:
    """Draw a schedule: the actions of each rank over time, the bubble, and the activations in memory.

    Examples:

        phalanx pipeline show 1f1b --stages 4 --microbatches 8

        phalanx pipeline show zb-v --stages 4 --microbatches 8 --times 2,2,1,0.5 --out zb-v.svg --out zb-v.csv

        phalanx pipeline show searched --stages 4 --microbatches 8 --times 2,3,1,0.5 --memory 3

        phalanx pipeline show mine.csv --times 1,1,1,0.1 --json
    """
    for file in out or []:
        if file.suffix not in OUTPUT_SUFFIXES:
            raise UserError("--out", str(file), "has an unknown suffix", fix=f"use one of {', '.join(OUTPUT_SUFFIXES)}")
    durations = _parse_times(times)
    _check_applicable_options(schedule, stages, microbatches, virtual_stages, memory)
    built: Schedule | None = None
    if schedule == IDEALIZED:
        timeline = book_overlap(*_require_sizes(stages, microbatches))
    else:
        built = _load_schedule(schedule, stages, microbatches, v=virtual_stages, memory=memory, times=durations)
        timeline = simulate(built, _divide_among_stages(durations, built))
    ranks = range(len(timeline.spans))
    facts: dict[str, Any] = {
        "schedule": schedule,
        "ranks": len(ranks),
        "makespan": float(timeline.makespan),
        "bubble": float(timeline.bubble),
        "bubble_over_ideal": float(timeline.bubble_overhead),
        "window_bubble": float(timeline.rank_span_bubble),
        "windows": [float(timeline.rank_span(rank)) for rank in ranks],
    }
    if built is None:
        facts["active"] = active_fraction_per_tick(timeline)
    else:
        peaks = [float(peak_activations(built, rank)) for rank in ranks]
        facts |= {"stages": built.stages, "micro_batches": built.micro_batches, "peak_activations": peaks}
    for file in out or []:
        _write_timeline(file, facts["schedule"], timeline, schedule=built)
    if json_:
        print(json.dumps(facts, indent=2))
    else:
        _print_timeline(facts, timeline, out or [])


def _check_applicable_options(
    name: str, stages: int | None, microbatches: int | None, virtual_stages: int | None, memory: float | None
) -> None:
    """Raise UserError for an option that does not apply to this schedule."""
    has_none = f"does not apply to {name}"
    if name.endswith(".csv"):
        for option, value in (("--stages", stages), ("--microbatches", microbatches)):
            require(value is None, option, value, f"{has_none}, which defines it", f"remove {option}")
    applies = virtual_stages is None or (name in SCHEDULES and SCHEDULES[name].has_virtual_stages)
    require(applies, "--virtual-stages", virtual_stages, has_none, "remove --virtual-stages")
    require(memory is None or name == "searched", "--memory", memory, has_none, "remove --memory")


def _require_sizes(stages: int | None, microbatches: int | None) -> tuple[int, int]:
    for option, value in (("--stages", stages), ("--microbatches", microbatches)):
        if value is None:
            raise UserError(option, None, "is missing", fix=f"add {option}, such as {option} 4")
    return stages or 0, microbatches or 0


def _parse_times(text: str) -> list[Fraction]:
    try:
        values = [Fraction(part.strip()) for part in text.split(",")]
    except (ValueError, ZeroDivisionError):
        values = []
    if not 3 <= len(values) <= 4 or min(values) < 0 or not any(values[:3]):
        fix = "write F,B,W or F,B,W,COMM, such as 1,1,1,0.2"
        raise UserError("--times", text, "is not a list of three or four times", fix=fix)
    return [*values, Fraction(0)][:4]


def _divide_among_stages(times: list[Fraction], schedule: Schedule) -> ActionTimes:
    """Divide a rank's times among its stages."""
    stages = max(len(schedule.stages_of(rank)) for rank in range(schedule.ranks))
    forward, input, weight = (time / stages for time in times[:3])
    return ActionTimes(forward=forward, input_grad=input, weight_grad=weight, transfer=times[3])


def _load_schedule(
    name: str, stages: int | None, microbatches: int | None, v: int | None, memory: float | None, times: list[Fraction]
) -> Schedule:
    if name.endswith(".csv"):
        return Schedule.from_rows(_read_schedule_rows(Path(name)))
    if name not in (known := [*PUBLISHED, "searched", IDEALIZED]):
        raise UserError("SCHEDULE", name, "is not known", fix=f"use one of {', '.join(known)}, or a .csv file")
    p, m = _require_sizes(stages, microbatches)
    if name == "searched":
        forward, input, weight, transfer = map(float, times)
        half = ActionTimes(forward=forward / 2, input_grad=input / 2, weight_grad=weight / 2, transfer=transfer)
        return search_schedule(p, m, half, limit=Fraction(p if memory is None else memory))
    return build_schedule(name, p, m, v=v or 2)


def _read_schedule_rows(file: Path) -> list[list[Any]]:
    try:
        return read_csv(file.read_text(encoding="utf-8"), file.name)
    except (OSError, UnicodeDecodeError) as error:
        fix = "give a CSV file with a row per rank"
        raise UserError("FILE", str(file), f"cannot be read: {error}", fix=fix) from None


def _write_timeline(file: Path, name: str, timeline: Timeline, schedule: Schedule | None) -> None:
    if file.suffix != ".csv":
        check_replaceable("--out", file, file.suffix[1:])
    elif file.is_file():
        # A schedule has no comments that show who wrote it.
        try:
            read_csv(file.read_text(encoding="utf-8"), str(file))
        except (UserError, UnicodeDecodeError, OSError):
            problem = "exists, and does not contain a schedule"
            raise UserError("--out", str(file), problem, fix="choose another name") from None
    try:
        if file.suffix == ".json":
            file.write_text(json.dumps(chrome_trace(timeline)), encoding="utf-8")
        elif file.suffix != ".csv":
            draw(timeline, name, file)
        elif schedule is None:
            fix = "write .svg, .png or .json"
            raise UserError("--out", str(file), "cannot represent an idealised timeline", fix=fix)
        else:
            file.write_text(to_csv(schedule), encoding="utf-8")
    except OSError as error:
        fix = "choose a file in an existing directory"
        raise UserError("--out", str(file), f"cannot be written: {error}", fix=fix) from None


def _print_timeline(facts: dict[str, Any], timeline: Timeline, written: list[Path]) -> None:
    console = Terminal()
    idealised = " (idealised: not a schedule that can run; see 1f1b)" if "active" in facts else ""
    console.print(Text(facts["schedule"] + idealised, "bold"))
    margin = len(f"rank {facts['ranks'] - 1} ")
    for rank, line in enumerate(lines(timeline, console.width - margin)):
        console.print(Text(f"rank {rank}".ljust(margin)) + line, soft_wrap=True)
    legend = [
        Text(f" {kind} ", f"black on {COLORS[kind][0]}") + Text(f" {LEGEND[kind]}   ") for kind in kinds(timeline)
    ]
    console.print(Text(" " * margin) + Text().join(legend))
    console.print()
    console.print(_build_summary_table(facts))
    for file in written:
        console.print(f"wrote {file}", highlight=False)


def _build_summary_table(facts: dict[str, Any]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_row("makespan", f"{facts['makespan']:g}")
    table.add_row("bubble", f"{facts['bubble']:.2%} of the makespan, {facts['bubble_over_ideal']:.2%} over the ideal")
    table.add_row("", f"{facts['window_bubble']:.2%} between the first and the last action of a rank")
    if "active" in facts:
        table.add_row("active", " ".join(f"{share:.0%}" for share in facts["active"]))
    else:
        peaks = facts["peak_activations"]
        by_rank = " ".join(f"{peak:g}" for peak in peaks)
        table.add_row("peak", f"{max(peaks):g} micro-batches of activations; by rank {by_rank}")
    return table


app.command()(split)


@app.command()
def check(
    file: Annotated[
        Path, Argument(help="A schedule in PyTorch's CSV format, with a row per rank.", metavar="FILE.csv")
    ],
    order: Annotated[bool, Option("--order", help="Ignore idle cells: ranks wait for their inputs.")] = False,
    json_: Json = False,
) -> None:
    """Validate a schedule and list its violations; the exit code is 1 if it is rejected.

    In a file with idle (empty) cells each cell is a tick, and an action must come in a later tick than its inputs.
    Without idle cells, or with --order, each rank starts an action as soon as its inputs are available.

    Examples:

        phalanx pipeline check mine.csv

        phalanx pipeline check mine.csv --order --json
    """
    grid = _read_schedule_rows(file)
    schedule = Schedule.from_rows(grid)
    as_drawn = not order and any(step is None for row in grid for step in row)
    problems = lockstep_violations(grid) if as_drawn else violations(schedule)
    facts = {
        "valid": not problems,
        "as_drawn": as_drawn,
        "ranks": schedule.ranks,
        "stages": schedule.stages,
        "micro_batches": schedule.micro_batches,
        "violations": [str(violation) for violation in problems],
    }
    if json_:
        print(json.dumps(facts, indent=2))
    else:
        _print_violations(facts, runs=as_drawn and not violations(schedule))
    if problems:
        sys.exit(1)


def _print_violations(facts: dict[str, Any], runs: bool) -> None:
    console = Terminal()
    sizes = f"{facts['ranks']} ranks, {facts['stages']} stages, {facts['micro_batches']} micro-batches"
    reading = "as drawn, a tick per cell" if facts["as_drawn"] else "as orders"
    if facts["valid"]:
        console.print(Text("valid", "bold green") + Text(f" {reading}: {sizes}"))
        return
    count = len(facts["violations"])
    title = f" {reading}: {plural(count, 'violation')} ({sizes})"
    console.print(Text("rejected", "bold red") + Text(title), soft_wrap=True)
    for violation in facts["violations"]:
        console.print(Text(f"  {violation}"), soft_wrap=True)
    if runs:
        console.print("without its idle cells the schedule is valid: see --order", style="dim")

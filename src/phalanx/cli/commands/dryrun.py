"""`phalanx dryrun`: a run's program, traced at full size without hardware, compared with the plan."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from phalanx.cli.common.options import Json, Machine, Overrides, RunOrModel, Trust
from phalanx.cost.exact.layout_checks import check_layout
from phalanx.spec.errors import UserError
from phalanx.spec.files.load import load_run
from phalanx.spec.formatting import plural
from phalanx.spec.phases import phases_of, phases_to_show
from phalanx.spec.resolved_run import ResolvedRun
from phalanx.spec.run import RunSpec

if TYPE_CHECKING:
    from collections.abc import Callable


def dryrun(
    run: RunOrModel,
    ranks: Annotated[
        int | None, Option(help="Number of ranks; default: cluster.nproc_per_node x cluster.nodes.", min=1, metavar="N")
    ] = None,
    trace: Annotated[
        str,
        Option(
            help="Ranks to trace: corners (the first and last rank of each axis), all, or a list.",
            metavar="all|corners|0,5,...",
        ),
    ] = "corners",
    phase_number: Annotated[
        int | None,
        Option("--phase", help="Trace this [[phase]] only, from 0; by default the run and each.", min=0, metavar="N"),
    ] = None,
    jobs: Annotated[int, Option(help="Ranks traced in parallel, one core each.", min=1, metavar="N")] = 2,
    full: Annotated[bool, Option("--full", help="Run all micro-batches; by default equal ones run once.")] = False,
    machine: Machine = None,
    set_: Overrides = None,
    trust: Trust = None,
    json_: Json = False,
) -> None:
    """Trace a training step of selected ranks of a run of any size, without hardware, and compare it with the plan.

    The program of `phalanx train` runs rank by rank on tensors without data: forward and backward passes, clipping, the
    optimizer. Its collectives (operation, ranks, calls, bytes), memory and FLOPs are compared with the plan.
    Collectives and state must be equal, peak memory within 2 %, FLOPs within 0.1 %. Equal micro-batches
    and blocks run once. Experts are balanced. The exit code is 1 if plan and program disagree.

    Examples:

        phalanx dryrun run.toml --ranks 1024

        phalanx dryrun run.toml --ranks 8 --trace all --set layout.tp=2

        phalanx dryrun automatic.toml --trace 0,5 --json
    """
    run_spec = load_run(run, set_ or [], machine=machine, trust=trust)
    run_spec, world_size = _resolve_layout(run_spec, ranks)
    from phalanx.launch.recomputation import resolve_recomputation

    run_spec = resolve_recomputation(run_spec, world_size)
    resolved = ResolvedRun(run_spec, world_size)
    check_layout(resolved)  # before the import of torch, which takes a second
    from phalanx.cli.views.dryrun import dry_run_to_json, print_dry_run
    from phalanx.verify.dry_run import check_traceable, corner_ranks
    from phalanx.verify.dry_run_report import dry_run

    check_traceable(resolved)
    traced_ranks = _parse_ranks(trace, world_size, lambda: corner_ranks(resolved))
    reports = []
    for name, traced_run in _traced_runs(run_spec, phase_number):
        if name:
            print(f"{name}:", file=sys.stderr if json_ else sys.stdout)
        with _show_tracing_progress(len(traced_ranks), jobs) as done:
            report = dry_run(traced_run, world_size, traced_ranks, max_workers=jobs, full=full, on_rank_traced=done)
        reports.append((name, traced_run, report))
        if not json_:
            print_dry_run(traced_run, report)
    if json_:
        first, *others = [{"phase": name} | dry_run_to_json(traced, report) for name, traced, report in reports]
        print(json.dumps(first | ({"phases": others} if others else {}), indent=2))
    raise typer.Exit(not all(report.ok for _, _, report in reports))


def _traced_runs(run: RunSpec, number: int | None) -> list[tuple[str, RunSpec]]:
    """Return the names and settings of the phases to trace: one with a number, or each with other sizes."""
    if number is None:
        return [("", run), *((phase.name, phase.run) for phase in phases_to_show(run))]
    # Of a ramp, its last batch, which is also the batch after it.
    phases = [(phase.name, phase.run) for phase in phases_of(run) if phase.number == number][-1:]
    if not phases:
        problem = f"is not a phase of this run, which has {plural(len(run.phase), 'table')} [[phase]]"
        raise UserError("--phase", number, problem, "give the number of a table, from 0")
    return phases


def _resolve_layout(run: RunSpec, ranks: int | None) -> tuple[RunSpec, int]:
    """Return the run with its number of ranks, and with a planned layout if it is automatic."""
    nodes = run.cluster.nodes
    nproc = run.cluster.nproc_per_node
    world_size = ranks or nodes * (nproc or 1)
    if not run.auto_layout:
        return run, world_size
    from phalanx.cli.commands.auto_layout import choose_layout

    per_node = min(nproc or world_size, world_size)
    if world_size % per_node:
        fix = f"use a multiple of cluster.nproc_per_node ({per_node})"
        raise UserError("--ranks", world_size, 'does not fill whole nodes, which layout = "auto" requires', fix=fix)
    cluster = run.cluster.replace(nodes=world_size // per_node, nproc_per_node=per_node)
    return choose_layout(run.replace(cluster=cluster))[0], world_size


def _parse_ranks(text: str, world_size: int, corners: Callable[[], list[int]]) -> list[int]:
    """Return the ranks that `--trace` names."""
    if text == "all":
        return list(range(world_size))
    if text == "corners":
        return corners()
    entries = [entry.strip() for entry in text.split(",")]
    allowed = f"write all, corners, or numbers from 0 to {world_size - 1} separated by commas"
    if not all(entry.isdecimal() for entry in entries):
        raise UserError("--trace", text, "is not a list of ranks", fix=allowed)
    ranks = sorted({int(entry) for entry in entries})
    if ranks[-1] >= world_size:
        raise UserError("--trace", text, f"contains rank {ranks[-1]}, but the run has {world_size} ranks", fix=allowed)
    return ranks


@contextmanager
def _show_tracing_progress(ranks: int, jobs: int) -> Iterator[Callable[[int, bool], None]]:
    """Show a progress bar of traced ranks on a terminal, or print a line for each to any other stderr."""
    if not sys.stderr.isatty():
        print(f"tracing {plural(ranks, 'rank')}, {min(jobs, ranks)} at a time", file=sys.stderr)
        finished = count(1)

        def print_rank(rank: int, agrees: bool) -> None:
            verdict = "agrees" if agrees else "differs from the plan"
            print(f"rank {rank}: {verdict} ({next(finished)} of {ranks})", file=sys.stderr)

        yield print_rank
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from phalanx.spec.terminal import Terminal

    columns = TextColumn("tracing ranks, {task.fields[jobs]} at a time"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, TimeElapsedColumn(), console=Terminal(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=ranks, jobs=min(jobs, ranks))
        yield lambda _rank, _agrees: progress.advance(task)

"""`phalanx plan`: ranked layouts with their time, memory and reasons."""

from __future__ import annotations

import shlex
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phalanx.cli.commands.plan_batch import predict_file
from phalanx.cli.commands.plan_checks import (
    check_export,
    check_layout_text,
    check_number,
    check_options,
    check_output_files,
    check_picture,
    given_options,
)
from phalanx.cli.commands.plan_cluster import run_on_cluster
from phalanx.cli.commands.plan_nodes import parse_node_counts, show_node_counts
from phalanx.cli.common.options import Json, Machine, Overrides
from phalanx.cli.common.progress import search_progress

if TYPE_CHECKING:
    from phalanx.plan.search.result import EvaluatedLayout, Plan
    from phalanx.spec.run import RunSpec

MIN_SEARCHED = 10
"""Minimum number of layouts to search, so that a safer one than the first can be found."""


def plan(
    context: typer.Context,
    run: Annotated[
        Path | None, typer.Argument(help="A run file, or a Hugging Face config.json.", metavar="[RUN.toml]")
    ] = None,
    machine: Machine = None,
    nodes: Annotated[
        str | None,
        typer.Option(
            help="Number of nodes; default: cluster.nodes. A range shows the best layout of each number.",
            metavar="N|MIN:MAX",
        ),
    ] = None,
    nproc: Annotated[int | None, typer.Option(help="Devices per node; default: 8, or a CPU's cores.", min=1)] = None,
    topology: Annotated[
        Path | None,
        typer.Option(help="Links of a node, written by `phalanx doctor --topology`.", metavar="FILE"),
    ] = None,
    top: Annotated[int, typer.Option(help="Number of layouts to show.", min=1)] = 10,
    all_: Annotated[bool, typer.Option("--all", help="Show all schedules of each layout.")] = False,
    explain: Annotated[
        int | None, typer.Option(help="Explain time and memory of layout K of the table.", min=1, metavar="K")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Draw the explanation: .svg, .html or .png.", metavar="FILE")
    ] = None,
    tokens: Annotated[
        float | None, typer.Option(help="Training tokens for days, energy and cost; default: the run's.", min=1)
    ] = None,
    why_not: Annotated[
        str | None, typer.Option(help="Compare a layout, or the text of a row, with the best.", metavar="LAYOUT")
    ] = None,
    diff: Annotated[
        tuple[str, str] | None,
        typer.Option(help="Compare two layouts, or rows by number or text.", metavar="A B"),
    ] = None,
    export: Annotated[
        str | None,
        typer.Option(help="Trainer to export to: megatron, torchtitan, deepspeed or nanotron.", metavar="TRAINER"),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write a run file with the best layout.", metavar="FILE")] = None,
    batch: Annotated[Path | None, typer.Option(help="Predict each row of a CSV file.", metavar="FILE.csv")] = None,
    html: Annotated[
        Path | None, typer.Option(help="Write a web page that shows and compares all layouts.", metavar="FILE")
    ] = None,
    web: Annotated[
        bool, typer.Option("--web", help="Serve that page locally; it can plan again with other choices.")
    ] = False,
    port: Annotated[int, typer.Option(help="Port of --web; 0: any free port.", min=0, max=65535, metavar="N")] = 0,
    set_: Overrides = None,
    json_: Json = False,
) -> None:
    """Rank all parallel layouts of a run on a cluster, in seconds and without a GPU.

    Examples:

        phalanx plan run.toml --machine h100 --nodes 16

        phalanx plan run.toml --machine h100 --nodes 16 --explain 1 --picture step.svg

        phalanx plan run.toml --machine h100 --nodes 16 --why-not "tp=16,pp=2,data_parallel=zero1"

        phalanx plan run.toml --machine h100 --nodes 16 --diff 1 "tp=8,data_parallel=zero3"

        phalanx plan run.toml --machine h100 --nodes 2048 --tokens 15e12 --set cluster.storage_bytes_per_second=1e12

        phalanx plan run.toml --machine a100 --nodes 8 --export megatron

        phalanx plan run.toml --machine h100 --nodes 8:64

        phalanx plan run.toml --machine h100 --nodes 16 --web

        phalanx plan run.toml --machine h100 --nodes 16 --html plan.html

        phalanx plan --batch runs.csv --json
    """
    check_options(run, batch, out, given=given_options(context))
    if picture is not None:
        explain = explain or 1
        check_picture(picture, {"--diff": diff, "--why-not": why_not, "--export": export, "--json": json_ or None})
    if explain is not None:
        check_number("--explain", explain)
    if why_not is not None:
        check_layout_text("--why-not", why_not)
    files = {"--out": out, "--picture": picture, "--html": html}
    check_output_files(run, {option: file for option, file in files.items() if file is not None})
    if batch is not None:
        predict_file(batch, json_)
        return
    assert run is not None
    num_nodes, *more_counts = parse_node_counts(nodes, given_options(context))
    load = partial(run_on_cluster, run, machine, nproc=nproc, overrides=set_ or [], topology=topology)
    if more_counts:
        show_node_counts(load, [num_nodes, *more_counts], as_json=json_)
        return
    if web or html is not None:
        from phalanx.cli.commands.plan_explorer import PlanArguments, serve_page, write_page

        arguments = PlanArguments(
            run=run,
            machine=machine,
            nodes=num_nodes,
            nproc=nproc,
            overrides=tuple(set_ or ()),
            topology=topology,
            all_schedules=all_,
            top=top,
        )
        if html is None:
            serve_page(arguments, port)
            return
        exploration = write_page(arguments, html)
        if out is not None:
            _write(exploration.run, exploration.plan.best, out)
        return
    described, world_size = load(num_nodes)
    if export is not None:
        check_export(described, export)
    if diff is not None:
        _show_diff(described, world_size, diff, all_schedules=all_)
        return
    user_layout = _evaluate_user_layout(described, world_size, why_not) if why_not is not None else None
    search_result = _search(
        described, world_size, max(top, explain or 1, MIN_SEARCHED), all_schedules=all_, trainer=export
    )
    best = search_result.layouts[0]
    if out is not None:  # before any output, which a pager may cut off
        _write(described, search_result.best, out)
    if export is not None:
        _export(described, world_size, search_result.best, trainer=export)
    elif user_layout is not None:
        _show_why_not(described, world_size, user_layout, best=best, text=why_not or "")
    elif explain is not None:
        _explain(described, world_size, search_result, number=explain, picture=picture)
    elif json_:
        _print_json(described, world_size, search_result, top=top, tokens=tokens)
    else:
        _show(described, world_size, search_result, top=top, tokens=tokens)


def _write(run: RunSpec, option: EvaluatedLayout, file: Path) -> None:
    """Write the run with a layout, ready to train."""
    from phalanx.cli.common.output_file import write_file
    from phalanx.launch.jobs.job import PORT
    from phalanx.spec.files.write import to_toml
    from phalanx.spec.formatting import WRITTEN_BY
    from phalanx.spec.learning_rate import learning_rate_note
    from phalanx.spec.small_run_defaults import unset_choices_of_large_model

    omitted, unset_note = unset_choices_of_large_model(run)
    notes = [note for note in (learning_rate_note(run), unset_note) if note]
    comments = [f"# {line}\n" for line in (f"{WRITTEN_BY} plan", *notes)]
    described = to_toml(run.model_copy(update={"layout": option.candidate.layout()}), omitted)
    write_file("--out", file, f"{''.join(comments)}{described}")
    name = shlex.quote(str(file))
    start = f"phalanx train {name}"
    if run.cluster.nodes > 1:
        start += (
            f" --rendezvous FIRST_NODE:{PORT} on each node, or phalanx launch {name} --to slurm|kubernetes|skypilot"
        )
    print(f"wrote {file} ({option.candidate}, P(OOM) {option.p_oom:.1%}); start it with {start}", file=sys.stderr)
    for note in notes:
        print(note, file=sys.stderr)


def _search(run: RunSpec, world_size: int, num_layouts: int, all_schedules: bool, trainer: str | None = None) -> Plan:
    """Return the fastest layouts; for another trainer, those that it can express if any."""
    from phalanx.plan.export.export import search_exportable
    from phalanx.plan.search.explain import plan_or_raise

    with search_progress(world_size) as report:
        if trainer is not None:
            return search_exportable(run, world_size, trainer, keep=num_layouts, report=report)  # type: ignore[arg-type]
        return plan_or_raise(run, world_size, num_layouts, report=report, group_schedules=not all_schedules)


def _print_json(run: RunSpec, world_size: int, search_result: Plan, top: int, tokens: float | None) -> None:
    import json

    from phalanx.cli.views.plan_json import plan_to_json

    print(json.dumps(plan_to_json(run, world_size, search_result, top=top, tokens=tokens), indent=2))


def _show(run: RunSpec, world_size: int, search_result: Plan, top: int, tokens: float | None) -> None:
    from phalanx.cli.views.plan import print_layout_table

    print_layout_table(run, world_size, search_result, top=top, tokens=tokens)


def _explain(run: RunSpec, world_size: int, search_result: Plan, number: int, picture: Path | None) -> None:
    from phalanx.cli.views.plan import print_explanation
    from phalanx.cli.views.plan_picture import breakdown

    check_number("--explain", number, search_result.layouts)
    if picture is not None:
        from phalanx.report.drawing.step_breakdown import save_picture

        save_picture(breakdown(run, world_size, search_result, index=number - 1), picture)
        print(f"wrote {picture}", file=sys.stderr)
    print_explanation(run, world_size, search_result, index=number - 1)


def _evaluate_user_layout(run: RunSpec, world_size: int, text: str) -> EvaluatedLayout:
    """Evaluate a layout that the user wrote; an invalid one is reported before any search."""
    from phalanx.plan.search.evaluate import evaluate_layout_text

    return evaluate_layout_text(run, world_size, text)


def _show_why_not(
    run: RunSpec, world_size: int, user_layout: EvaluatedLayout, best: EvaluatedLayout, text: str
) -> None:
    from phalanx.cli.views.plan import print_comparison

    notes = _other_strategies({"yours": (text, user_layout)})
    print_comparison(run, world_size, user_layout, second=best, names=("yours", "best"), notes=notes)


def _other_strategies(written: dict[str, tuple[str, EvaluatedLayout]]) -> list[str]:
    """Return a line for each layout, by its name, whose strategy is not the one in the user's text."""
    from phalanx.plan.search.candidates import describe_other_strategy
    from phalanx.plan.search.evaluate import parse_layout

    reasons = {
        name: describe_other_strategy(parse_layout(text), option.candidate) for name, (text, option) in written.items()
    }
    return [f"{name}: {reason}" for name, reason in reasons.items() if reason]


def _show_diff(run: RunSpec, world_size: int, texts: tuple[str, str], all_schedules: bool) -> None:
    """Print the comparison of two layouts, each given by its number in the table or written out."""
    from phalanx.cli.views.plan import print_comparison

    numbers = [int(text) for text in texts if text.isdecimal()]
    for number in numbers:
        check_number("--diff", number)
    written = {text: _evaluate_user_layout(run, world_size, text) for text in texts if not text.isdecimal()}
    ranked = _search(run, world_size, max(numbers), all_schedules=all_schedules).layouts if numbers else []
    for number in numbers:
        check_number("--diff", number, ranked)
    first, second = (written[text] if text in written else ranked[int(text) - 1] for text in texts)
    names = [f"layout {text}" if text.isdecimal() else name for text, name in zip(texts, "AB", strict=True)]
    notes = _other_strategies(
        {name: (text, written[text]) for name, text in zip(names, texts, strict=True) if text in written}
    )
    print_comparison(run, world_size, first, second=second, names=(names[0], names[1]), notes=notes)


def _export(run: RunSpec, world_size: int, option: EvaluatedLayout, trainer: str) -> None:
    from phalanx.plan.export.common import TRAINER_NAMES
    from phalanx.plan.export.export import export
    from phalanx.spec.errors import UserError
    from phalanx.spec.formatting import format_gib

    exported_run = run.model_copy(update={"layout": option.candidate.layout()})
    try:
        exported = export(exported_run, world_size, trainer)  # type: ignore[arg-type]
    except UserError as error:
        problem = f"cannot express any layout of this run that fits; for the fastest, {error.field} {error.problem}"
        raise UserError("--export", trainer, problem, fix=error.fix) from None
    print(exported.text)
    figures = f"{option.step_seconds:.3f} s a step and {format_gib(option.memory_bytes)} a rank"
    other = TRAINER_NAMES[trainer]  # type: ignore[index]
    print(
        f"{option.candidate}: {figures} are Phalanx's figures for this layout; those of {other} are not predicted",
        file=sys.stderr,
    )
    for note in (*exported.notes, *_why_not_best(run, world_size, option, trainer=trainer)):
        print(f"note: {note}", file=sys.stderr)


def _why_not_best(run: RunSpec, world_size: int, exported: EvaluatedLayout, trainer: str) -> list[str]:
    """Explain why the exported layout is not the planner's best, if the trainer cannot express that."""
    from phalanx.plan.export.export import export
    from phalanx.spec.errors import UserError

    chosen = _search(run, world_size, MIN_SEARCHED, all_schedules=False).best
    if chosen.candidate == exported.candidate:
        return []
    try:
        export(run.model_copy(update={"layout": chosen.candidate.layout()}), world_size, trainer)  # type: ignore[arg-type]
    except UserError as error:
        reason = f"{error.field} = {error.value} {error.problem}"
        return [f"The best layout for Phalanx is {chosen.candidate} ({chosen.step_seconds:.3f} s): {reason}."]
    return []

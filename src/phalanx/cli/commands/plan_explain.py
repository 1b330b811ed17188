"""`phalanx plan explain`: where the time and memory of a layout go; `phalanx plan compare`: why another is slower."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from phalanx.cli.commands.plan_cluster import rank_layouts, run_on_cluster
from phalanx.cli.common.options import AllSchedules, Machine, Nodes, Nproc, Overrides, RunOrModel, Topology
from phalanx.cli.common.output_file import check_output_file

if TYPE_CHECKING:
    from phalanx.plan.search.result import EvaluatedLayout


def explain(
    run: RunOrModel,
    number: Annotated[
        int, Argument(help="Number of the layout in the table of `phalanx plan`.", min=1, metavar="K")
    ] = 1,
    picture: Annotated[Path | None, Option(help="Draw the explanation: .svg, .html or .png.", metavar="FILE")] = None,
    all_: AllSchedules = False,
    machine: Machine = None,
    nodes: Nodes = None,
    nproc: Nproc = None,
    topology: Topology = None,
    set_: Overrides = None,
) -> None:
    """Explain time and memory of a layout, why others are slower, and what would make it faster.

    `phalanx plan run.toml --json` has the same parts of all layouts.

    Examples:

        phalanx plan explain run.toml --machine h100 --nodes 16

        phalanx plan explain run.toml 2 --machine h100 --nodes 16 --picture step.svg
    """
    if picture is not None:
        from phalanx.report.drawing.canvas import check_picture_file

        check_picture_file(picture, "--picture")
        check_output_file("--picture", picture, run, picture.suffix[1:])
    _check_number("K", number)
    resolved = run_on_cluster(run, machine, nodes, nproc, set_ or [], topology)
    ranked = rank_layouts(resolved, number, all_schedules=all_)
    _check_number("K", number, ranked.layouts)
    from phalanx.cli.views.plan import print_explanation

    if picture is not None:
        from phalanx.cli.views.plan_picture import breakdown
        from phalanx.plan.search.phases import largest_phase
        from phalanx.report.drawing.step_breakdown import save_picture

        save_picture(breakdown(largest_phase(resolved), ranked, index=number - 1), picture)
        print(f"wrote {picture}", file=sys.stderr)
    print_explanation(resolved, ranked, index=number - 1)


def compare(
    run: RunOrModel,
    layout: Annotated[
        str, Argument(help="Fields, such as `tp=4,pp=8`, or the number or text of a row of the table.", metavar="A")
    ],
    other: Annotated[str | None, Argument(help="Another layout; default: the first of the table.", metavar="B")] = None,
    all_: AllSchedules = False,
    machine: Machine = None,
    nodes: Nodes = None,
    nproc: Nproc = None,
    topology: Topology = None,
    set_: Overrides = None,
) -> None:
    """Show why a layout is slower than the best, or than another: their parts of time and memory side by side.

    Examples:

        phalanx plan compare run.toml "tp=16,pp=2,data_parallel=zero1" --machine h100 --nodes 16

        phalanx plan compare run.toml 1 "tp=8,data_parallel=zero3" --machine h100 --nodes 16
    """
    texts = (layout, other or "1")
    numbers = {text: int(digits) for text in texts if (digits := text.strip().rstrip("*")).isdecimal()}
    for number in numbers.values():
        _check_number("layout", number)
    resolved = run_on_cluster(run, machine, nodes, nproc, set_ or [], topology)
    from phalanx.cli.views.plan import print_comparison
    from phalanx.plan.search.candidates import describe_other_strategy
    from phalanx.plan.search.evaluate import evaluate_layout_text, parse_layout
    from phalanx.plan.search.phases import largest_phase

    largest = largest_phase(resolved)
    layouts_by_text = {text: evaluate_layout_text(largest, text) for text in texts if text not in numbers}
    names = [f"layout {numbers[text]}" if text in numbers else letter for text, letter in zip(texts, "AB", strict=True)]
    if other is None:
        names = [names[0] if layout in numbers else "yours", "best"]
    notes = []
    for name, text in zip(names, texts, strict=True):
        if text in layouts_by_text and (
            reason := describe_other_strategy(parse_layout(text), layouts_by_text[text].candidate)
        ):
            notes.append(f"{name}: {reason}")
    if numbers:
        ranked = rank_layouts(resolved, max(numbers.values()), all_schedules=all_).layouts
        for text, number in numbers.items():
            _check_number("layout", number, ranked)
            layouts_by_text[text] = ranked[number - 1]
    first_layout, second_layout = (layouts_by_text[text] for text in texts)
    print_comparison(resolved, first_layout, second_layout, names=(names[0], names[1]), notes=notes)


def _check_number(argument: str, number: int, layouts: list[EvaluatedLayout] | None = None) -> None:
    """Raise UserError for a number that is not in the table; before a search, for one that is in no table."""
    from phalanx.plan.search.search import MAX_EXACT_EVALUATIONS
    from phalanx.spec.errors import UserError

    max_number = MAX_EXACT_EVALUATIONS if layouts is None else len(layouts)
    if not 1 <= number <= max_number:
        raise UserError(argument, number, "is not a layout of the table", fix=f"use a number from 1 to {max_number:,}")

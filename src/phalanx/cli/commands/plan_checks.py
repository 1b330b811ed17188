"""Validation of the arguments of `phalanx plan` before the search."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from phalanx.cli.common.output_file import check_replaceable
from phalanx.spec.errors import UserError

if TYPE_CHECKING:
    from phalanx.plan.search.result import EvaluatedLayout
    from phalanx.spec.run import RunSpec

VIEWS = ("--explain", "--why-not", "--diff", "--export", "--web", "--html")
"""Options for output other than the table."""


def given_options(context: typer.Context) -> list[str]:
    """Return the options given on a command line, spelled as in help."""
    options = [parameter for parameter in context.command.params if parameter.param_type_name == "option"]
    sources = [context.get_parameter_source(option.name or "") for option in options]
    return [
        max(option.opts, key=len)
        for option, source in zip(options, sources, strict=True)
        if source and source.name == "COMMANDLINE"
    ]


def check_options(run: Path | None, batch: Path | None, out: Path | None, given: list[str]) -> None:
    """Raise UserError for options that cannot be combined.

    Args:
        run: Run file; None if it is not given.
        batch: File of --batch; None if it is not given.
        out: File of --out; None if it is not given.
        given: Options of the command line, as in `given_options`.
    """
    views = [option for option in given if option in VIEWS]
    conflicting = ", ".join(option for option in given if option not in ("--batch", "--json"))
    if (run is None) == (batch is None):
        raise UserError("plan", None, "requires either a run file or --batch FILE.csv", fix="give one of them")
    if len(views) > 1:
        raise UserError(" ".join(views), None, "cannot be combined", fix="use one of them")
    if batch is not None and conflicting:
        fix = "remove these options: each row of the table has its own machine, ranks, layout and batch"
        raise UserError("--batch", str(batch), f"cannot be combined with {conflicting}", fix=fix)
    if "--json" in given and views:
        raise UserError(
            "--json",
            None,
            f"cannot be combined with {views[0]}",
            fix=f"remove {views[0]}: the JSON of `phalanx plan --json` has all parts",
        )
    without_layout = [view for view in views if view in ("--diff", "--web")]
    if out is not None and without_layout:
        fix = f"remove --out or {without_layout[0]}"
        raise UserError("--out", str(out), f"cannot be combined with {without_layout[0]}", fix=fix)
    if "--port" in given and "--web" not in given:
        raise UserError("--port", None, "requires --web", fix="add --web, or remove --port")


def check_layout_text(option: str, text: str) -> None:
    """Raise UserError for the number of a row where a layout is required."""
    number = text.strip().rstrip("*")
    if number.isdecimal():
        other = 1 if number != "1" else 2
        raise UserError(
            option,
            text,
            "is the number of a row, but the option takes the layout that you expected to be the best",
            fix='write its fields, such as "tp=4,pp=8,data_parallel=zero1", or paste the text of a row; to compare '
            f"rows by number: --diff {number} {other}",
        )


def check_export(run: RunSpec, trainer: str) -> None:
    """Raise UserError for an unknown trainer, or one that cannot express the run in any layout."""
    from phalanx.plan.export.export import check_run, require_known_trainer

    require_known_trainer(trainer, "--export")
    check_run(run, trainer)  # type: ignore[arg-type]


def check_output_files(run: Path | None, files: dict[str, Path]) -> None:
    """Raise UserError for an output file that cannot be written, or that is another file of the command.

    Args:
        run: Run file; None if it is not given.
        files: Output files by option.
    """
    owners = {} if run is None else {run.resolve(): "the run file itself"}
    for option, file in files.items():
        if (owner := owners.get(file.resolve())) is not None:
            raise UserError(option, str(file), f"is {owner}", fix="choose another file")
        owners[file.resolve()] = f"the file of {option}"
        _check_writable(option, file)


def _check_writable(option: str, file: Path) -> None:
    """Raise UserError for an output file that cannot be written, before the search."""
    problem = ""
    if file.is_dir():
        problem = "it is a directory"
    elif not file.parent.is_dir():
        problem = f"there is no directory {file.parent}"
    elif not os.access(file if file.exists() else file.parent, os.W_OK):
        problem = "permission denied"
    if problem:
        raise UserError(option, str(file), f"cannot be written: {problem}", fix="choose another file")
    check_replaceable(option, file)


def check_picture(file: Path, other_options: dict[str, object]) -> None:
    """Raise UserError for a file that is not a picture, or an option that is not drawn."""
    from phalanx.report.drawing.canvas import check_picture_file

    check_picture_file(file, "--picture")
    for option, value in other_options.items():
        if value is not None:
            raise UserError(
                "--picture", str(file), f"cannot be combined with {option}: it draws --explain", fix=f"remove {option}"
            )


def check_number(option: str, number: int, layouts: list[EvaluatedLayout] | None = None) -> None:
    """Raise UserError for a number that is not in the table.

    Args:
        option: Option with the number.
        number: Number of a layout, from 1.
        layouts: Layouts of the table; None before a search, for a number that cannot be in any table.
    """
    from phalanx.plan.search.search import MAX_EXACT_EVALUATIONS

    last = MAX_EXACT_EVALUATIONS if layouts is None else len(layouts)
    if not 1 <= number <= last:
        raise UserError(option, number, "is not a layout of the table", fix=f"use a number from 1 to {last:,}")

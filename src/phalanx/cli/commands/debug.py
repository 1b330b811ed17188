"""`phalanx debug`: the cause of a hang or a failure, from the reports of a run's ranks; a learning-rate range test."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from phalanx.cli.common.default_command import GroupWithDefault
from phalanx.cli.common.options import Json, Overrides, RunFile

if TYPE_CHECKING:
    from phalanx.debug.hang_messages import Explanation
    from phalanx.plan.advice.learning_rate_range import LearningRateRange

CURVE_WIDTH = 60
"""Characters of the curve of losses."""

app = typer.Typer(
    cls=GroupWithDefault,
    invoke_without_command=True,
    subcommand_metavar="| COMMAND ...",
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)


@app.callback()
def debug(run: Annotated[Path, Argument(help="Run directory.", metavar="RUN_DIR")], json_: Json = False) -> None:
    """Explain why a run hung or failed: which rank to check, what every rank did, and what to do next.

    The command compares the records of the ranks in hangs/ and failures/: the last collectives of each rank, and its
    position. Restarted ranks remove these files; events.jsonl keeps the findings about earlier failures.

    Examples:

        phalanx debug runs/first

        phalanx debug runs/first --json
    """
    from phalanx.api.run_results import diagnose

    explanation = diagnose(run)
    print(json.dumps(asdict(explanation), indent=2)) if json_ else _print_explanation(explanation)


@app.command("lr-range")
def lr_range(
    run_file: RunFile,
    low: Annotated[float, Option(help="First learning rate.", min=1e-12, metavar="RATE")] = 1e-6,
    high: Annotated[float, Option(help="Last learning rate.", min=1e-12, metavar="RATE")] = 1.0,
    steps: Annotated[int, Option(help="Steps from the first to the last.", metavar="N")] = 100,
    nproc: Annotated[
        int | None, Option(help="Ranks on this machine; default: one per GPU, or one.", min=1, metavar="N")
    ] = None,
    set_: Overrides = None,
    json_: Json = False,
) -> None:
    """Find a learning rate: train some steps while it rises exponentially, and show the loss at each.

    The suggestion is half of the rate with the lowest loss. The training is a run of its own, NAME-lr-range, without
    warm-up; it ends when the loss has doubled. The run file stays as it is.

    Examples:

        phalanx debug lr-range run.toml --nproc 2

        phalanx debug lr-range run.toml --low 1e-5 --high 0.1 --steps 200
    """
    from phalanx.api.training import train_run
    from phalanx.plan.advice.learning_rate_range import range_test_run, rising_rate, suggest_learning_rate
    from phalanx.report.run_data import read_run
    from phalanx.runs.create import run_directory
    from phalanx.spec.base import require
    from phalanx.spec.files.load import load_run

    run = range_test_run(load_run(run_file, set_ or []), low, high, steps)
    fix = "remove that directory, or choose another name with --set name=..."
    require(not run_directory(run).exists(), "name", run.name, f"is that of a run in {run_directory(run)}", fix)
    result = train_run(run, nproc=nproc, quiet=json_)
    if result.exit_reason != "finished":
        print(f"phalanx: {result.run_dir} {result.exit_reason}: {result.failure}", file=sys.stderr)
        raise typer.Exit(1)
    metrics = read_run(result.run_dir).step_metrics
    rates = [high * rising_rate(line["step"] - 1, steps, low / high) for line in metrics]
    tested = suggest_learning_rate(rates, [line.get("loss") for line in metrics])
    if json_:
        print(json.dumps({"run_dir": str(result.run_dir), **asdict(tested)}))
    else:
        _print_range(tested)


def _print_range(tested: LearningRateRange) -> None:
    from phalanx.cli.common.text import print_line, text_table
    from phalanx.cli.views.report import sparkline
    from phalanx.spec.terminal import Terminal

    console = Terminal(highlight=False)
    rates = tested.rates
    curve = sparkline(tested.losses, CURVE_WIDTH)
    print_line(console, f"\n{curve}  loss, for rates of {rates[0]:.1e} to {rates[-1]:.1e}")
    table = text_table(numbers=("learning rate", "loss"))
    for index in range(0, len(rates), max(1, len(rates) // 16)):
        table.add_row(f"{rates[index]:.1e}", f"{tested.losses[index]:.3f}")
    console.print(table)
    if tested.suggestion is None:
        print_line(console, f"no suggestion: {tested.reason}")
    else:
        print_line(console, f"suggested: optimizer.learning_rate = {tested.suggestion:g}, {tested.reason}")


def _print_explanation(explanation: Explanation) -> None:
    from rich.text import Text

    from phalanx.spec.terminal import Terminal

    console = Terminal()

    def print_text(text: Text | str) -> None:
        console.print(text, highlight=False, soft_wrap=True, markup=False)

    verdict = explanation.verdict
    print_text(Text(verdict.summary, "bold"))
    print_text(f"what to do: {verdict.fix}")
    if explanation.step is not None:
        print_text(f"the last step that all reporting ranks finished: {explanation.step}")
    for line in explanation.earlier_failures:
        print_text(f"before: {line}")
    for problem in explanation.problems:
        print_text(f"! {problem}")
    if explanation.ranks:
        print_text("")
    for rank, line in explanation.ranks.items():
        is_culprit = rank in verdict.ranks
        print_text(Text(f"{'>' if is_culprit else ' '} {line}", "bold" if is_culprit else ""))

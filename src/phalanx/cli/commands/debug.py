"""`phalanx debug`: the cause of a hang or a failure, from the reports of a run's ranks."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument

from phalanx.cli.common.options import Json

if TYPE_CHECKING:
    from phalanx.debug.hang_messages import Explanation


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

"""Arguments shared by several commands."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer import Argument, Option

logger = logging.getLogger(__name__)


def complete_presets(folder: str) -> Callable[[str], list[str]]:
    """Return the shell completion of the names of presets: "models" or "machines"."""

    def complete(incomplete: str) -> list[str]:
        from phalanx.spec.files.load import preset_names  # imports pydantic, which the help of a command does not need

        return [name for name in preset_names(folder) if name.startswith(incomplete)]

    return complete


def counted_family_note(path: Path) -> str | None:
    """Return what a plan leaves out of a model whose family Phalanx cannot train; None for others."""
    from phalanx.spec.families.registry import COUNTED_FAMILIES
    from phalanx.spec.files.load import counted_family

    if (family := counted_family(path)) is None:
        return None
    model = f"{family} is planned as Phalanx's transformer of its sizes, without {COUNTED_FAMILIES[family]}"
    return f"{path}: {model}; Phalanx cannot train its weights"


def log_counted_family(path: Path) -> Path:
    """Log the note of `counted_family_note`. Returns the path."""
    if (note := counted_family_note(path)) is not None:
        logger.warning("%s", note)
    return path


RunFile = Annotated[Path, Argument(help="A run file.", metavar="RUN.toml")]
RunOrModel = Annotated[
    Path,
    Argument(
        help="A run file, or a model: a preset (`phalanx info --list`), a Hugging Face config.json or its directory, "
        "or a name on the hub (org/name).",
        metavar="RUN.toml|MODEL",
        callback=log_counted_family,
    ),
]
Ranks = Annotated[
    int | None, Option(help="Ranks of the run; default: cluster.nproc_per_node x cluster.nodes.", min=1, metavar="N")
]
Machine = Annotated[
    str | None,
    Option(
        help="A machine preset (`phalanx info --list`), or a file by `phalanx calibrate`.",
        metavar="NAME|FILE",
        autocompletion=complete_presets("machines"),
    ),
]
Nodes = Annotated[int | None, Option(help="Number of nodes; default: cluster.nodes.", min=1)]
Nproc = Annotated[int | None, Option(help="Devices per node; default: 8, or a CPU's cores.", min=1)]
Topology = Annotated[
    Path | None, Option(help="Links of a node, written by `phalanx doctor --topology`.", metavar="FILE")
]
AllSchedules = Annotated[bool, Option("--all", help="Show all schedules of each layout.")]
Overrides = Annotated[
    list[str] | None, Option("--set", help="Override a field, e.g. training.seq_len=4096.", metavar="K=V")
]
Trust = Annotated[
    bool | None,
    Option("--trust", help="Run the code that a run directory names (your own model, loss, callbacks ...)."),
]


def _parse_step(text: str) -> int | Literal["best"]:
    from phalanx.runs.checkpoints import parse_step  # would slow down help

    try:
        return parse_step(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a step: write its number, or best") from None


STEP_OPTION: dict[str, Any] = {"parser": _parse_step, "metavar": "N|best"}
Step = Annotated[
    Any,  # NamedStep, whose import would slow down help
    Option(
        help="Checkpoint of this step, or best: of the lowest validation loss. Default: the newest.",
        **STEP_OPTION,
    ),
]
Temperature = Annotated[float, Option(help="Sampling temperature; 0: the most likely token.", min=0)]
TopK = Annotated[int, Option(help="Sample from this number of most likely tokens; 0: all.", min=0)]
TopP = Annotated[float, Option(help="Sample from the most likely tokens of this total probability.", min=0, max=1)]
MinP = Annotated[float, Option(help="Least probability, as a share of that of the most likely token.", min=0, max=1)]
RepetitionPenalty = Annotated[float, Option(help="Factor against tokens that the text has already; 1: none.", min=0.1)]
Seed = Annotated[int, Option(help="Random seed; equal seeds give equal texts.", min=0)]
TrainedRun = Annotated[
    Path,
    Argument(
        help="Directory of a run, of one of its checkpoints (RUN_DIR/checkpoints/step-N), or of a swarm.",
        metavar="RUN_DIR",
    ),
]
Json = Annotated[bool, Option("--json", help="Print JSON.")]

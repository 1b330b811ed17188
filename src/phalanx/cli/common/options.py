"""Arguments shared by several commands."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from typer import Argument, Option


def note_counted_family(path: Path) -> Path:
    """Print what a plan leaves out of a model whose family Phalanx cannot train. Returns the path."""
    from phalanx.spec.files.hf_families import COUNTED_FAMILIES
    from phalanx.spec.files.load import counted_family

    if (family := counted_family(path)) is not None:
        print(
            f"phalanx: {path}: {family} is planned as Phalanx's transformer of the same sizes, without "
            f"{COUNTED_FAMILIES[family]}; Phalanx cannot train its weights",
            file=sys.stderr,
        )
    return path


RunFile = Annotated[Path, Argument(help="A run file.", metavar="RUN.toml")]
RunOrModel = Annotated[
    Path,
    Argument(
        help="A run file, or a model: a preset (`phalanx info --list`), a Hugging Face config.json or its directory.",
        metavar="RUN.toml|MODEL",
        callback=note_counted_family,
    ),
]
Ranks = Annotated[
    int | None, Option(help="Ranks of the run; default: cluster.nproc_per_node x cluster.nodes.", min=1, metavar="N")
]
Machine = Annotated[
    str | None,
    Option(help="A machine preset (`phalanx info --list`), or a file by `phalanx calibrate`.", metavar="NAME|FILE"),
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
Json = Annotated[bool, Option("--json", help="Print JSON.")]

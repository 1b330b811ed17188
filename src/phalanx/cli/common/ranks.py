"""Commands that use a trained model in one process, or in several ranks of this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

if TYPE_CHECKING:
    from phalanx.spec.layout import Layout
    from phalanx.train.checkpoint.load_model import TrainedWeights

Ranks = Annotated[int | None, Option("--nproc", help="Ranks on this machine, by default one.", min=1, metavar="N")]


def is_first_rank() -> bool:
    """Return whether this process prints: it is the only one, or the first rank."""
    return int(os.environ.get("RANK", 0)) == 0


def layout_of_ranks(found: TrainedWeights, nproc: int | None, overrides: list[str] | None) -> Layout | None:
    """Return the layout in which a rank loads a model: ZeRO-3, unless --set names another. None in one process.

    With --nproc, run this command in ranks of torchrun instead, and exit with their code. Raises UserError before they
    start if the model cannot be shared so."""
    from phalanx.runs.create import RUN_FILE
    from phalanx.spec.errors import UserError
    from phalanx.spec.files.load import load_run
    from phalanx.spec.layout import Layout
    from phalanx.train.checkpoint.load_in_ranks import inference_run

    is_rank = "RANK" in os.environ
    num_ranks = int(os.environ["WORLD_SIZE"]) if is_rank else nproc or 1
    if num_ranks == 1 and not is_rank:
        if overrides:
            raise UserError("--set", overrides, "has no effect in one process", "add --nproc, or remove it")
        return None
    layout = Layout(data_parallel="zero3")
    if overrides:
        layout = load_run(found.directory / RUN_FILE, overrides, environment={}).layout
    inference_run(found, layout, num_ranks)
    if not is_rank:
        raise typer.Exit(_run_ranks(num_ranks))
    return layout


def _run_ranks(num_ranks: int) -> int:
    """Run this command in several ranks of torchrun, and return the exit code."""
    arguments = iter(sys.argv[1:])
    # torchrun would take it for a short form of its own option.
    kept = [
        word for word in arguments if not (word == "--nproc" and next(arguments)) and not word.startswith("--nproc=")
    ]
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    return subprocess.run([sys.executable, "-m", *launcher, "-m", "phalanx", *kept], env=environment).returncode

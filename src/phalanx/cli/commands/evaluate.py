"""`phalanx evaluate`: scores of a checkpoint by lm-eval's tasks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from phalanx.cli.common.options import Json, Overrides, Step, TrainedRun, Trust

if TYPE_CHECKING:
    from phalanx.data.tokenizer import Tokenizer
    from phalanx.train.checkpoint.load_model import TrainedWeights
    from phalanx.train.lm_eval_model import LmEvalModel


def evaluate(
    run: TrainedRun,
    tasks: Annotated[str, Option(help="Tasks of lm-eval, with commas.", metavar="NAMES")],
    include_path: Annotated[
        str | None, Option(help="Folder with files of tasks. They may name Python functions, which run.")
    ] = None,
    num_fewshot: Annotated[
        int | None, Option(help="Examples before each question; default: of the task.", min=0)
    ] = None,
    limit: Annotated[int | None, Option(help="Maximum number of questions of each task.", min=1)] = None,
    chat: Annotated[bool, Option("--chat", help="Render questions by the tokenizer's chat template.")] = False,
    batch_size: Annotated[int, Option(help="Texts in a forward pass.", min=1)] = 8,
    nproc: Annotated[int | None, Option(help="Ranks on this machine, by default one.", min=1, metavar="N")] = None,
    set_: Overrides = None,
    step: Step = None,
    trust: Trust = None,
    json_: Json = False,
) -> None:
    """Score a checkpoint by tasks of EleutherAI's lm-eval, and record the scores in the run directory.

    The model is scored as it is trained, in fp32, without an export. With --nproc or under torchrun it is shared by
    ranks: by ZeRO-3, or the layout that --set names (tp or pp, and data parallelism). Reports show the scores.

    Examples:

        phalanx evaluate runs/first --tasks hellaswag,arc_easy --limit 200

        phalanx evaluate runs/first --tasks words --include-path . --json

        phalanx evaluate runs/large --tasks mmlu --nproc 8 --set layout.tp=8

        phalanx evaluate runs/tuned --tasks gsm8k --chat --step best
    """
    from phalanx.spec.errors import UserError
    from phalanx.spec.extras import missing_package

    try:
        import lm_eval  # noqa: F401
    except ImportError:
        raise missing_package("--tasks", tasks, "lm_eval") from None
    if (nproc or 1) > 1 and "RANK" not in os.environ:
        raise typer.Exit(_run_ranks(nproc or 1))
    from phalanx.data.tokenizer import load_tokenizer
    from phalanx.runs.scores import add_scores
    from phalanx.train.checkpoint.load_model import find_trained_weights
    from phalanx.train.lm_eval_model import evaluate_tasks

    if set_ and "RANK" not in os.environ:
        raise UserError("--set", set_, "has no effect in one process", "add --nproc, or remove it")
    found = find_trained_weights(run, step, trust=bool(trust))
    model = _open_model(found, load_tokenizer(found.tokenizer_file), set_ or [], batch_size)
    results = evaluate_tasks(model, tasks.split(","), include_path, num_fewshot, limit, chat)
    if int(os.environ.get("RANK", 0)):
        return
    add_scores(found.directory, found.step, results, num_fewshot=num_fewshot, limit=limit)
    if json_:
        print(json.dumps({"step": found.step, "tasks": results}, default=str))
        return
    from phalanx.cli.views.scores import scores_table
    from phalanx.report.facts import group_scores
    from phalanx.runs.scores import read_scores
    from phalanx.spec.terminal import Terminal

    Terminal().print(scores_table(group_scores(read_scores(found.directory))))


def _run_ranks(nproc: int) -> int:
    """Run this command in several ranks of torchrun, and return the exit code."""
    arguments = iter(sys.argv[1:])
    # torchrun would take it for a short form of its own option.
    kept = [
        word for word in arguments if not (word == "--nproc" and next(arguments)) and not word.startswith("--nproc=")
    ]
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc)]
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    return subprocess.run([sys.executable, "-m", *launcher, "-m", "phalanx", *kept], env=environment).returncode


def _open_model(found: TrainedWeights, tokenizer: Tokenizer, overrides: list[str], batch_size: int) -> LmEvalModel:
    from phalanx.train.lm_eval_model import model_in_one_process, model_in_ranks

    if "RANK" not in os.environ:
        return model_in_one_process(found, tokenizer, batch_size)
    from phalanx.launch.process import init_distributed
    from phalanx.runs.create import RUN_FILE
    from phalanx.spec.files.load import load_run
    from phalanx.spec.layout import Layout

    layout = Layout(data_parallel="zero3")
    if overrides:
        layout = load_run(found.directory / RUN_FILE, overrides, environment={}).layout
    device = init_distributed()
    return model_in_ranks(found, tokenizer, layout, device, batch_size)

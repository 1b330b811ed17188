"""`phalanx evaluate`: held-out losses of a checkpoint, or its scores by lm-eval's tasks."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from phalanx.cli.common.options import Json, Overrides, Step, TrainedRun, Trust
from phalanx.cli.common.ranks import Ranks, is_first_rank, layout_of_ranks

if TYPE_CHECKING:
    from pathlib import Path

    from phalanx.data.tokenizer import Tokenizer
    from phalanx.runs.checkpoints import NamedStep
    from phalanx.spec.layout import Layout
    from phalanx.train.checkpoint.load_model import TrainedWeights
    from phalanx.train.lm_eval_model import LmEvalModel


def evaluate(
    run: TrainedRun,
    tasks: Annotated[
        str | None, Option(help="Tasks of lm-eval, with commas; default: held-out losses.", metavar="NAMES")
    ] = None,
    include_path: Annotated[
        str | None, Option(help="Folder with files of tasks. They may name Python functions, which run.")
    ] = None,
    num_fewshot: Annotated[
        int | None, Option(help="Examples before each question; default: of the task.", min=0)
    ] = None,
    limit: Annotated[int | None, Option(help="Maximum number of questions of each task.", min=1)] = None,
    chat: Annotated[bool, Option("--chat", help="Render questions by the tokenizer's chat template.")] = False,
    batch_size: Annotated[int, Option(help="Texts in a forward pass.", min=1)] = 8,
    nproc: Ranks = None,
    set_: Overrides = None,
    step: Step = None,
    trust: Trust = None,
    json_: Json = False,
) -> None:
    """Print the held-out loss and perplexity of a checkpoint by source, or score it by tasks of EleutherAI's lm-eval.

    Losses are those of held-out sets by name, or of the held-out part of each source, as in training. Scores are
    recorded in the run directory, and reports show them; the model is scored in fp32, without an export. With --nproc
    or under torchrun, ranks share the model: by ZeRO-3, or the layout that --set names.

    Examples:

        phalanx evaluate runs/first --step 100

        phalanx evaluate runs/first --tasks hellaswag,arc_easy --limit 200

        phalanx evaluate runs/first --tasks words --include-path . --json

        phalanx evaluate runs/large --tasks mmlu --nproc 8 --set layout.tp=8

        phalanx evaluate runs/tuned --tasks gsm8k --chat --step best
    """
    if tasks is None:
        options = {
            "--include-path": include_path,
            "--num-fewshot": num_fewshot,
            "--limit": limit,
            "--chat": chat or None,
        }
        _print_held_out(run, options, nproc, set_, step, bool(trust), json_)
        return
    from phalanx.spec.extras import missing_package

    try:
        import lm_eval  # noqa: F401
    except ImportError:
        raise missing_package("--tasks", tasks, "lm_eval") from None
    from phalanx.data.tokenizer import load_tokenizer
    from phalanx.runs.scores import add_scores
    from phalanx.train.checkpoint.load_model import find_trained_weights
    from phalanx.train.lm_eval_model import check_chat, evaluate_tasks, find_tasks

    found = find_trained_weights(run, step, trust=bool(trust))
    tokenizer = load_tokenizer(found.tokenizer_file)
    names = tasks.split(",")
    if nproc is not None:
        # Ranks would each say the same.
        find_tasks(names, include_path)
        check_chat(tokenizer, chat)
    model = _open_model(found, tokenizer, layout_of_ranks(found, nproc, set_), batch_size)
    results = evaluate_tasks(model, names, include_path, num_fewshot, limit, chat)
    if not is_first_rank():
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


def _print_held_out(
    run: Path,
    options: dict[str, Any],
    nproc: int | None,
    set_: list[str] | None,
    step: NamedStep,
    trust: bool,
    json_: bool,
) -> None:
    """Print the held-out losses of a checkpoint. Raises UserError for `options` of tasks."""
    import torch

    from phalanx.launch.process import init_distributed
    from phalanx.spec.base import require
    from phalanx.train.checkpoint.load_model import find_trained_weights
    from phalanx.train.held_out import check_held_out, evaluate_held_out

    for option, value in options.items():
        require(value is None, option, value, "has no effect on held-out losses", "add --tasks, or remove it")
    found = find_trained_weights(run, step, trust=trust)
    check_held_out(found)
    layout = layout_of_ranks(found, nproc, set_)
    record = evaluate_held_out(found, layout, torch.device("cpu") if layout is None else init_distributed())
    if not is_first_rank():
        return
    if json_:
        print(json.dumps({**record, "step": found.step}))
        return
    from phalanx.cli.views.scores import held_out_table
    from phalanx.spec.terminal import Terminal

    Terminal().print(held_out_table(record, found.step))


def _open_model(found: TrainedWeights, tokenizer: Tokenizer, layout: Layout | None, batch_size: int) -> LmEvalModel:
    from phalanx.launch.process import init_distributed
    from phalanx.train.lm_eval_model import model_in_one_process, model_in_ranks

    if layout is None:
        return model_in_one_process(found, tokenizer, batch_size)
    return model_in_ranks(found, tokenizer, layout, init_distributed(), batch_size)

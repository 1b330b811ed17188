"""What a run has learned, whole and in one process, whatever wrote it down: a trainer's checkpoint, or a swarm."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from phalanx.data.prepare import tokenizer_without_training
from phalanx.model.transformer import Transformer
from phalanx.parallel.init_parameters import init_parameters
from phalanx.parallel.module_tensors import materialize
from phalanx.parallel.strategy import Strategy
from phalanx.runs.checkpoints import require_valid_checkpoint, step_of
from phalanx.runs.create import RUN_FILE, TOKENIZER_FILE
from phalanx.runs.swarm_records import SHARED_WEIGHTS_FILE
from phalanx.spec.errors import UserError
from phalanx.spec.files.load import load_run
from phalanx.spec.run import RunSpec
from phalanx.train.checkpoint.state import load_checkpoint

SWARM_WEIGHTS = (f"model/{SHARED_WEIGHTS_FILE}", SHARED_WEIGHTS_FILE)
"""What all nodes of a swarm have, in the directories of its coordinator and of a node: whole parameters."""


def load_trained_model(run_directory: Path) -> tuple[RunSpec, Transformer, Path, int | None]:
    """Return the run file, the trained model (fp32, on the CPU, one process), the tokenizer's path and the step of a
    run directory: of its newest checkpoint, or, without a step, of what a swarm has learned by now.

    Raises UserError if there is no intact checkpoint, and no swarm's weights.
    """
    if not (run_directory / RUN_FILE).is_file():
        raise UserError(
            "run directory", str(run_directory), f"has no {RUN_FILE}", fix="give a directory that phalanx train made"
        )
    run = load_run(run_directory / RUN_FILE, environment={})
    swarm_weights = next((path for name in SWARM_WEIGHTS if (path := run_directory / name).is_file()), None)
    checkpoint = require_valid_checkpoint(run_directory) if swarm_weights is None else None
    tokenizer = _find_tokenizer(run, run_directory)
    with torch.device("meta"):
        module = Transformer(run.model)
    materialize(module, torch.device("cpu"))
    if checkpoint is not None:
        load_checkpoint(checkpoint, Strategy(module), [])
    elif swarm_weights is not None:
        _load_weights(swarm_weights, module)
    return run, module.eval(), tokenizer, step_of(checkpoint) if checkpoint is not None else None


def _load_weights(file: Path, module: Transformer) -> None:
    """Give a model the parameters in a file, one at a time. Raises UserError if it is damaged, or another model's."""
    try:
        with safe_open(file, framework="pt") as weights:

            def read_weight(name: str, shape: torch.Size) -> Tensor:
                tensor: Tensor = weights.get_tensor(name)
                if tensor.shape != shape:
                    raise ValueError(f"{name} is {list(tensor.shape)} there, and {list(shape)} in the model")
                return tensor

            init_parameters(Strategy(module), read_weight)
    except (SafetensorError, OSError, ValueError) as error:
        problem = f"does not hold the weights of the model in run.toml: {error}"
        raise UserError("weights", str(file), problem, fix="give the directory as the swarm left it") from None


def _find_tokenizer(run: RunSpec, run_directory: Path) -> Path:
    """The tokenizer of a run; a swarm's coordinator, which reads no text, is given it here if that needs none.

    Raises UserError if it does.
    """
    file = run_directory / TOKENIZER_FILE
    if not file.exists():
        tokenizer = tokenizer_without_training(run.data)
        if tokenizer is None:
            problem = "has no tokenizer.json: that is made from the text, which nodes read and a coordinator does not"
            fix = f"copy it from a node: cp nodes/NAME/tokenizer.json {run_directory}"
            raise UserError("run directory", str(run_directory), problem, fix=fix)
        tokenizer.save(file)
    return file

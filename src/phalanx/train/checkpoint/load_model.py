"""Loading of a trained model into one process, from a trainer's checkpoint or from a swarm."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from phalanx.data.tokenizer import tokenizer_without_training
from phalanx.model.transformer import Transformer
from phalanx.parallel.init_parameters import init_parameters
from phalanx.parallel.module_tensors import materialize
from phalanx.parallel.strategy import Strategy
from phalanx.runs.checkpoints import NamedStep, require_valid_checkpoint, split_checkpoint_path, step_of
from phalanx.runs.create import RUN_FILE, TOKENIZER_FILE, require_run
from phalanx.runs.swarm_records import SHARED_WEIGHTS_FILE
from phalanx.spec.components import require_trusted
from phalanx.spec.errors import UserError
from phalanx.spec.files.load import load_run
from phalanx.spec.files.replace import replace_file
from phalanx.spec.run import RunSpec
from phalanx.train.checkpoint.state import load_checkpoint
from phalanx.train.components import build_network

SWARM_WEIGHTS = (f"model/{SHARED_WEIGHTS_FILE}", SHARED_WEIGHTS_FILE)
"""Files with the full shared parameters of a swarm: in the directory of its coordinator, and in that of a node."""


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """A trained model in one process, on the CPU, in fp32."""

    run: RunSpec
    directory: Path
    """Run directory."""
    module: nn.Module
    tokenizer_file: Path
    step: int | None
    """Step of the checkpoint; None for the current weights of a swarm."""


def load_trained_model(path: Path, step: NamedStep = None, *, trust: bool = False) -> TrainedModel:
    """Return the trained model of a run directory, of one of its checkpoints, or of a swarm's directory.

    `trust`: a network that the directory names may be imported. Raises UserError if the network is not trusted, or
    there are neither intact checkpoints nor weights of a swarm."""
    run_directory, step = split_checkpoint_path(path, step)
    require_run(run_directory)
    run = load_run(run_directory / RUN_FILE, environment={}, trust=trust)
    # Check the trust before any other file of the directory is read or written.
    if run.model.implementation is not None:
        require_trusted("model.implementation", run.model.implementation)
    swarm_weights = next((path for name in SWARM_WEIGHTS if (path := run_directory / name).is_file()), None)
    if swarm_weights is not None and step is not None:
        raise UserError("--step", step, "has no effect on a swarm, which keeps its current weights", "remove --step")
    checkpoint = require_valid_checkpoint(run_directory, step) if swarm_weights is None else None
    tokenizer = _find_tokenizer(run, run_directory)
    if run.model.implementation is not None:
        module = build_network(run, run.model.implementation)
    else:
        with torch.device("meta"):
            module = Transformer(run.model)
        materialize(module, torch.device("cpu"))
    if checkpoint is not None:
        load_checkpoint(checkpoint, Strategy(module), [])
    elif swarm_weights is not None:
        _load_weights(swarm_weights, module)
    return TrainedModel(
        run=run,
        directory=run_directory,
        module=module.eval(),
        tokenizer_file=tokenizer,
        step=step_of(checkpoint) if checkpoint is not None else None,
    )


def _load_weights(file: Path, module: nn.Module) -> None:
    """Load the parameters in a file, one at a time; raises UserError for a damaged file or another model."""
    try:
        with safe_open(file, framework="pt") as weights:

            def read_weight(name: str, shape: torch.Size) -> Tensor:
                tensor: Tensor = weights.get_tensor(name)
                if tensor.shape != shape:
                    raise ValueError(f"{name} is {list(tensor.shape)} in the file, but {list(shape)} in the model")
                return tensor

            init_parameters(Strategy(module), read_weight)
    except (SafetensorError, OSError, ValueError) as error:
        problem = f"does not contain the weights of the model in run.toml: {error}"
        raise UserError("weights", str(file), problem, "pass the unchanged directory of the swarm") from None


def _find_tokenizer(run: RunSpec, run_directory: Path) -> Path:
    """Return the path of a run's tokenizer.

    A swarm's coordinator, which reads no text, creates a tokenizer that needs no training. Raises UserError for other
    tokenizers."""
    file = run_directory / TOKENIZER_FILE
    if not file.exists():
        tokenizer = tokenizer_without_training(run.data)
        if tokenizer is None:
            problem = "has no tokenizer.json: nodes create it from their text, which the coordinator does not read"
            fix = f"copy it from a node: cp nodes/NAME/tokenizer.json {run_directory}"
            raise UserError("run directory", str(run_directory), problem, fix)
        replace_file(file, tokenizer.to_json())
    return file

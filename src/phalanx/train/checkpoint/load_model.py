"""Loading of a trained model into one process, from a trainer's checkpoint or from a swarm."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from phalanx.data.tokenizer import tokenizer_without_training
from phalanx.model.transformer import Transformer
from phalanx.parallel.init_parameters import init_parameters
from phalanx.parallel.module_tensors import materialize, named_buffers
from phalanx.parallel.strategy import Strategy
from phalanx.runs.checkpoint_store import is_local, list_in_run_directory
from phalanx.runs.checkpoints import (
    CHECKPOINTS_DIR,
    NamedStep,
    checkpoints,
    require_valid_checkpoint,
    split_checkpoint_path,
    step_of,
)
from phalanx.runs.create import RUN_FILE, TOKENIZER_FILE, require_run
from phalanx.runs.swarm_records import SHARED_WEIGHTS_FILE
from phalanx.spec.components import require_trusted
from phalanx.spec.errors import UserError
from phalanx.spec.files.load import load_run
from phalanx.spec.phases import run_after
from phalanx.spec.run import RunSpec
from phalanx.train.checkpoint.state import load_checkpoint
from phalanx.train.checkpoint.stored_tensors import StoredTensor, open_tensors
from phalanx.train.components import build_network

logger = logging.getLogger(__name__)

SWARM_WEIGHTS = (f"model/{SHARED_WEIGHTS_FILE}", SHARED_WEIGHTS_FILE)
"""Files with the full shared parameters of a swarm: in the directory of its coordinator, and in that of a node."""


@dataclass(frozen=True, kw_only=True)
class TrainedWeights:
    """The files of a trained model."""

    run: RunSpec
    directory: Path
    """Run directory."""
    tokenizer_file: Path
    checkpoint: Path | None
    """Directory of the checkpoint; None for the current weights of a swarm."""
    swarm_file: Path | None
    """File with the current weights of a swarm; None for a checkpoint."""

    @property
    def step(self) -> int | None:
        """Step of the checkpoint; None for the current weights of a swarm."""
        return None if self.checkpoint is None else step_of(self.checkpoint)

    def tensors(self) -> Mapping[str, StoredTensor | Tensor]:
        """Return the parameters and buffers of the model by name. Those of a checkpoint are not read yet.

        Raises UserError for damaged files."""
        if self.checkpoint is None:
            module = self.load_module()
            return dict(module.named_parameters()) | dict(named_buffers(module))
        stored = open_tensors(self.checkpoint).items()
        return {name.removeprefix("model."): tensor for name, tensor in stored if name.startswith("model.")}

    def load_module(self) -> nn.Module:
        """Return the model in one process, on the CPU, in fp32. Raises UserError for damaged files."""
        if self.run.model.implementation is not None:
            module = build_network(self.run, self.run.model.implementation)
        else:
            with torch.device("meta"):
                module = Transformer(self.run.model)
            materialize(module, torch.device("cpu"))
        if self.checkpoint is not None:
            load_checkpoint(self.checkpoint, Strategy(module), [])
        elif self.swarm_file is not None:
            _load_weights(self.swarm_file, module)
        return module.eval()


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """A trained model in one process, on the CPU, in fp32."""

    run: RunSpec
    """With the settings of its last step, if the run has phases."""
    directory: Path
    """Run directory."""
    module: nn.Module
    tokenizer_file: Path
    step: int | None
    """Step of the checkpoint; None for the current weights of a swarm."""


def load_trained_model(path: Path, step: NamedStep = None, *, trust: bool = False) -> TrainedModel:
    """Return the trained model of `find_trained_weights` in memory. Raises UserError as that function does."""
    found = find_trained_weights(path, step, trust=trust)
    return TrainedModel(
        run=found.run,
        directory=found.directory,
        module=found.load_module(),
        tokenizer_file=found.tokenizer_file,
        step=found.step,
    )


def find_trained_weights(path: Path, step: NamedStep = None, *, trust: bool = False) -> TrainedWeights:
    """Return the weights of a run directory, of one of its checkpoints, or of a swarm's directory.

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
    if swarm_weights is None:
        list_stored_checkpoints(run, run_directory)
    checkpoint = require_valid_checkpoint(run_directory, step) if swarm_weights is None else None
    if checkpoint is not None:
        run = run_after(run, step_of(checkpoint))
    return TrainedWeights(
        run=run,
        directory=run_directory,
        tokenizer_file=_find_tokenizer(run, run_directory),
        checkpoint=checkpoint,
        swarm_file=swarm_weights,
    )


def list_stored_checkpoints(run: RunSpec, run_directory: Path) -> None:
    """Add the checkpoints of the run's object store, which may be out of reach if this machine has one."""
    try:
        list_in_run_directory(run, run_directory)
    except UserError as error:
        if not any(is_local(checkpoint) for checkpoint in checkpoints(run_directory / CHECKPOINTS_DIR)):
            raise
        logger.warning("only checkpoints on this machine are used: %s", error)


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
        tokenizer.save(file)
    return file

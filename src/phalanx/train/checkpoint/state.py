"""The state in a checkpoint: model, optimizer and random number generators, as named tensors."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from typing_extensions import TypedDict

from phalanx.parallel.dtensor_shards import local_tensor
from phalanx.parallel.module_tensors import named_buffers
from phalanx.parallel.strategy import Strategy
from phalanx.runs.decode import Decode, decoder, read_json, require_keys
from phalanx.spec.errors import UserError
from phalanx.train.checkpoint.stored_reader import open_checkpoint
from phalanx.train.optim.muon import Muon


class _RankFile(TypedDict):
    """The file of a rank in a checkpoint."""

    random: Annotated[dict[str, str], require_keys("torch")]
    """States of random number generators, in hexadecimal text."""
    sha256: dict[str, str]


STATE_KEYS = {
    torch.optim.AdamW: {"step", "exp_avg", "exp_avg_sq"},
    torch.optim.SGD: {"momentum_buffer"},
    Muon: {"momentum"},
}
"""State of Phalanx's optimizers. What a checkpoint of another optimizer has besides is not loaded."""
_decode_rank_file: Decode[_RankFile] = decoder(_RankFile)


def checkpoint_tensors(strategy: Strategy, optimizers: list[torch.optim.Optimizer]) -> dict[str, Tensor]:
    """Return parameters, buffers and optimizer state under layout-free names."""
    as_global_dtensor = strategy.model_parallel.as_global_dtensor
    parameters = strategy.stored_parameters.items()
    tensors = {f"model.{name}": as_global_dtensor(name, tensor.detach()) for name, tensor in parameters}
    tensors |= {f"model.{name}": tensor for name, tensor in named_buffers(strategy.module)}
    names = {id(parameter): name for name, parameter in strategy.trainable_parameters.items()}
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                if value is None:  # SGD without momentum
                    continue
                if not isinstance(value, Tensor) or (value.ndim and value.shape != parameter.shape):
                    problem = (
                        f"has the state {key!r}, which is neither a scalar tensor nor a tensor of its parameter's shape"
                    )
                    fix = "keep such a tensor, which checkpoints can save and split over ranks"
                    raise UserError("optimizer.implementation", type(optimizer).__name__, problem, fix)
                name = names[id(parameter)]
                tensors[f"optimizer.{key}.{name}"] = as_global_dtensor(name, value) if value.ndim else value
    return tensors


def load_full_tensors(checkpoint: Path) -> dict[str, Tensor]:
    """Return all full tensors of a checkpoint, in CPU memory."""
    reader = open_checkpoint(checkpoint)
    saved = read_tensor_metadata(reader, checkpoint).items()
    tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, (entry, _) in saved}
    _load_tensors(tensors, reader, checkpoint, no_dist=True)
    return tensors


def read_tensor_metadata(
    reader: HuggingFaceStorageReader, checkpoint: Path
) -> dict[str, tuple[TensorStorageMetadata, list[Path]]]:
    """Return the metadata of each tensor of a checkpoint, and the file of each of its chunks.

    Raises UserError if a header of the files is damaged, although the checksums are correct: DCP does not check
    headers."""
    try:
        metadata = reader.read_metadata()
        entries = metadata.state_dict_metadata.items()
        saved = {name: entry for name, entry in entries if isinstance(entry, TensorStorageMetadata)}
        if any(min(entry.size, default=0) < 0 for entry in saved.values()):
            raise ValueError("a dimension of a tensor is negative")
        tensor_bytes = sum(prod(entry.size) * entry.properties.dtype.itemsize for entry in saved.values())
        if tensor_bytes > sum(file.stat().st_size for file in Path(reader.path).iterdir()):
            raise ValueError("the tensors are larger than the files")
        storage = metadata.storage_data
        files = {
            name: [Path(storage[MetadataIndex(name, chunk.offsets)].relative_path) for chunk in entry.chunks]
            for name, entry in saved.items()
        }
    except (SafetensorError, OSError, LookupError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise damaged_weights_error(checkpoint, error) from None
    return {name: (entry, files[name]) for name, entry in saved.items()}


def _load_tensors(
    tensors: dict[str, Tensor], reader: HuggingFaceStorageReader, checkpoint: Path, no_dist: bool
) -> None:
    """Load tensors in place.

    Raises UserError if the files do not contain every part of the tensors, or their store cannot be reached."""
    try:
        load(tensors, storage_reader=reader, no_dist=no_dist)
    except CheckpointException as error:
        failure = next(iter(error.failures.values()))[0]
        raise failure if isinstance(failure, UserError) else damaged_weights_error(checkpoint, failure) from None


def damaged_weights_error(checkpoint: Path, error: BaseException) -> UserError:
    """Return the error for a checkpoint whose tensors cannot be read."""
    problem = f"has damaged weights ({type(error).__name__}: {str(error)[:200]})"
    fix = "restore the checkpoint from a copy, or remove its directory to use the one before"
    return UserError("checkpoint", str(checkpoint), problem, fix)


def load_checkpoint(checkpoint: Path, strategy: Strategy, optimizers: list[torch.optim.Optimizer]) -> None:
    """Load a checkpoint into a model and its optimizers; their layouts may differ.

    State that the checkpoint of another optimizer lacks starts from zero. Raises UserError if the checkpoint is of
    another model."""
    reader = open_checkpoint(checkpoint)
    saved = {name: tuple(entry.size) for name, (entry, _) in read_tensor_metadata(reader, checkpoint).items()}
    for optimizer in optimizers:
        _materialize_optimizer_state(optimizer, strategy, saved)
    tensors = checkpoint_tensors(strategy, optimizers)
    for name, tensor in tensors.items():
        if saved.get(name) != tuple(tensor.shape):
            saved_shape = list(saved[name]) if name in saved else "absent"
            problem = f"has {name} as {saved_shape}, but this run as {list(tensor.shape)}"
            fix = "resume with the model and optimizer of the checkpoint"
            raise UserError("checkpoint", str(checkpoint), problem, fix)
    _load_tensors(tensors, reader, checkpoint, no_dist=not dist.is_initialized())
    strategy.sync_model_weights()


def restore_tensors(
    shapes: Mapping[str, tuple[int, ...]],
    parts: Mapping[str, Tensor],
    strategy: Strategy,
    optimizers: list[torch.optim.Optimizer],
) -> None:
    """Restore this rank's shards of the state from `parts`; the layout must be the one that was saved."""
    for optimizer in optimizers:
        _materialize_optimizer_state(optimizer, strategy, shapes)
    for name, tensor in checkpoint_tensors(strategy, optimizers).items():
        local_tensor(tensor).copy_(parts[name])
    strategy.sync_model_weights()


def _materialize_optimizer_state(
    optimizer: torch.optim.Optimizer, strategy: Strategy, saved: Mapping[str, tuple[int, ...]]
) -> None:
    """Create the state that a checkpoint has for an optimizer that has not stepped yet."""
    keys = STATE_KEYS.get(type(optimizer))
    parameter_ids = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for name, shape in saved.items():
        kind, _, suffix = name.partition(".")
        key, _, parameter_name = suffix.partition(".")
        parameter = strategy.trainable_parameters.get(parameter_name)
        is_own = keys is None or key in keys
        if kind == "optimizer" and is_own and parameter is not None and id(parameter) in parameter_ids:
            scalar = torch.zeros((), dtype=torch.float32, device=parameter.device)
            optimizer.state[parameter][key] = strategy.init_optimizer_state(parameter) if shape else scalar


def restore_rng_state(checkpoint: Path, rank: int) -> None:
    """Restore this rank's random state; a rank that is missing in the checkpoint keeps its initial state."""
    path = checkpoint / f"rank-{rank:05d}.json"
    if not path.exists():
        return
    try:
        set_rng_state(read_json(path, _decode_rank_file)["random"])
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: a state of another size
        problem = f"does not contain the random state of rank {rank}: {error}"
        fix = "restore it from a copy, or remove the checkpoint to use the one before"
        raise UserError("checkpoint", str(path), problem, fix) from None


def rng_state() -> dict[str, str]:
    """Return this rank's random state, in hexadecimal text for JSON."""
    state = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return {name: tensor.numpy().tobytes().hex() for name, tensor in state.items()}


def set_rng_state(saved: Mapping[str, str]) -> None:
    """Restore a result of `rng_state`."""
    state = {key: bytearray.fromhex(text) for key, text in saved.items()}
    torch.set_rng_state(torch.frombuffer(state["torch"], dtype=torch.uint8))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.frombuffer(state["cuda"], dtype=torch.uint8))

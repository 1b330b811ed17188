"""A node's copy of the model, on all of its ranks and under whatever layout these have: its present weights, or their
gradients, written to a file, and weights from a file taken by every rank for its part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from phalanx.parallel.dtensor_shards import local_tensor
from phalanx.parallel.expert.partial_experts import (
    FrozenExpertWeights,
    TrainedExperts,
    init_frozen_experts,
    select_trained_experts,
)
from phalanx.parallel.init_parameters import init_parameter
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.strategy import Strategy
from phalanx.swarm.pieces import STACKED_EXPERTS_INFIX, ModelPiece
from phalanx.swarm.tensor_files import TensorFile
from phalanx.swarm.update_files import Weights
from phalanx.train.learner import Learner


def write_weights(
    strategy: Strategy, mesh: Mesh, trained_experts: TrainedExperts | None, num_experts: int, file: TensorFile
) -> None:
    """Write what is trained to a file of whole parameters."""
    _write_tensors(
        strategy,
        mesh,
        trained_experts.experts if trained_experts is not None else range(num_experts),
        tensors=strategy.trainable_parameters,
        file=file,
    )


class GradientCapture(torch.optim.Optimizer):
    """The optimizer of a node whose coordinator steps (ddp). It changes nothing: what it would have stepped by, all at
    once or as many at a time as the strategy brings, it writes to a file of whole parameters."""

    def __init__(self, learner: Learner, path: Path) -> None:
        super().__init__(
            list(learner.strategy.trainable_parameters.values()), {"lr": learner.run.optimizer.learning_rate}
        )
        self.strategy = learner.strategy
        self.mesh = learner.mesh
        self.path = path
        self.experts = range(learner.run.model.moe.num_experts if learner.run.model.moe else 0)

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        parameters = self.strategy.trainable_parameters
        gradients = {name: parameter.grad for name, parameter in parameters.items() if parameter.grad is not None}
        with TensorFile(self.path, writable=True) as file:
            _write_tensors(self.strategy, self.mesh, self.experts, tensors=gradients, file=file)


@torch.no_grad()
def _write_tensors(
    strategy: Strategy, mesh: Mesh, experts: Sequence[int], tensors: Mapping[str, Tensor], file: TensorFile
) -> None:
    """Write tensors like what is trained, of these experts: each by the first rank that has it. Parts of one parameter
    on several ranks are brought together, so that all ranks take part."""
    is_writer = _is_first(mesh)
    for name, tensor in tensors.items():
        global_tensor = strategy.as_global_dtensor(name, tensor.detach())
        full_tensor = global_tensor.full_tensor() if isinstance(global_tensor, DTensor) else global_tensor
        if not is_writer:
            continue
        if STACKED_EXPERTS_INFIX in name:
            for index, expert in enumerate(experts):
                file.write(ModelPiece(name, tuple(full_tensor.shape[1:]), expert), full_tensor[index])
        else:
            file.write(ModelPiece(name, tuple(full_tensor.shape)), full_tensor)


def _is_first(mesh: Mesh) -> bool:
    """Whether this is the first of the ranks that have the same stages."""
    return not any(coordinate for axis, coordinate in mesh.dims.coordinates(mesh.rank).items() if axis != "pp")


@torch.no_grad()
def read_weights(
    strategy: Strategy,
    trained_experts: TrainedExperts | None,
    num_experts: int,
    weights: Weights,
    blend_factors: Mapping[str, float],
    sent_weights: Weights | None = None,
) -> None:
    """Take weights: what is trained here and what is frozen. A parameter in `blend_factors` keeps that fraction
    of its value; to the others is added what was learned since `sent_weights` were sent."""

    def load_parameter(name: str, source: Weights) -> None:
        read_full = partial(_read_parameter, source)
        init_parameter(
            strategy,
            name,
            select_trained_experts(read_full, trained_experts, num_experts)
            if trained_experts is not None
            else read_full,
        )

    for name, parameter in strategy.trainable_parameters.items():  # one at a time: copies are of one
        reference = None if name in blend_factors else sent_weights
        local_value = parameter.clone() if reference is not None or blend_factors.get(name) else None
        load_parameter(name, weights)
        if local_value is None:
            continue
        if reference is None:
            parameter.lerp_(local_value, blend_factors[name])
            continue
        received_value = parameter.clone()
        load_parameter(name, reference)
        # in this order nothing is rounded where both are the same
        parameter.neg_().add_(received_value).add_(local_value)
    init_frozen_experts(strategy.module, partial(_read_parameter, weights), num_experts)
    strategy.sync_model_weights()


def _read_parameter(weights: Weights, name: str, shape: torch.Size) -> Tensor:
    """A parameter, from its pieces."""
    if STACKED_EXPERTS_INFIX not in name:
        return weights(ModelPiece(name, tuple(shape)))
    return torch.stack([weights(ModelPiece(name, tuple(shape[1:]), expert)) for expert in range(shape[0])])


@torch.no_grad()
def resident_bytes(strategy: Strategy, optimizers: Sequence[torch.optim.Optimizer]) -> int:
    """Of weights, gradients and optimizer state that this rank holds now, and of experts that rest, each storage
    once; not of what is offloaded."""
    resident = strategy.resident_tensors(optimizers)
    frozen_modules = [part for part in strategy.module.modules() if isinstance(part, FrozenExpertWeights)]
    tensors = [tensor for part in ("parameters", "gradients", "optimizer") for tensor in resident.get(part, ())]
    tensors += [buffer for part in frozen_modules for buffer in part.buffers()]
    storages = [local_tensor(tensor).untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

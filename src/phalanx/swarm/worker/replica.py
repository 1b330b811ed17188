"""A node's copy of the model, on all of its ranks and under whatever layout these have: its present weights, or their
gradients, written to a file, and weights from a file taken by every rank for its part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from phalanx.parallel.apply import init_parameter
from phalanx.parallel.dtensor_shards import local_tensor
from phalanx.parallel.expert.partial_experts import (
    FrozenExpertWeights,
    TrainedExperts,
    init_frozen_experts,
    select_trained_experts,
)
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.strategy import Strategy
from phalanx.swarm.pieces import STACKED, ModelPiece
from phalanx.swarm.tensor_files import TensorFile
from phalanx.swarm.update_files import Weights
from phalanx.train.learner import Learner


def write_weights(strategy: Strategy, mesh: Mesh, own: TrainedExperts | None, experts: int, file: TensorFile) -> None:
    """Write what is trained to a file of whole parameters."""
    _write(strategy, mesh, own.experts if own is not None else range(experts), strategy.trainable_parameters, file)


class GradientCapture(torch.optim.Optimizer):
    """The optimizer of a node whose coordinator steps (ddp). It changes nothing: what it would have stepped by, all at
    once or as many at a time as the strategy brings, it writes to a file of whole parameters."""

    def __init__(self, learner: Learner, path: Path) -> None:
        super().__init__(
            list(learner.strategy.trainable_parameters.values()), {"lr": learner.run.optimizer.learning_rate}
        )
        self.strategy, self.mesh, self.path = learner.strategy, learner.mesh, path
        self.experts = range(learner.run.model.moe.num_experts if learner.run.model.moe else 0)

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        trained = self.strategy.trainable_parameters
        gradients = {name: parameter.grad for name, parameter in trained.items() if parameter.grad is not None}
        with TensorFile(self.path, writable=True) as file:
            _write(self.strategy, self.mesh, self.experts, gradients, file)


@torch.no_grad()
def _write(
    strategy: Strategy, mesh: Mesh, experts: Sequence[int], tensors: Mapping[str, Tensor], file: TensorFile
) -> None:
    """Write tensors like what is trained, of these experts: each by the first rank that has it. Parts of one parameter
    on several ranks are brought together, so that all ranks take part."""
    first = _is_first(mesh)
    for name, tensor in tensors.items():
        part = strategy.as_global_dtensor(name, tensor.detach())
        whole = part.full_tensor() if isinstance(part, DTensor) else part
        if not first:
            continue
        if STACKED in name:
            for place, expert in enumerate(experts):
                file.write(ModelPiece(name, tuple(whole.shape[1:]), expert), whole[place])
        else:
            file.write(ModelPiece(name, tuple(whole.shape)), whole)


def _is_first(mesh: Mesh) -> bool:
    """Whether this is the first of the ranks that have the same stages."""
    return not any(place for axis, place in mesh.dims.coordinates(mesh.rank).items() if axis != "pp")


@torch.no_grad()
def read_weights(
    strategy: Strategy,
    own: TrainedExperts | None,
    experts: int,
    weights: Weights,
    kept: Mapping[str, float],
    since: Weights | None = None,
) -> None:
    """Take weights: what is trained here and what is frozen. Of a parameter in `kept` so much of what it was stays; to
    the others is added what was learned `since` they were so."""

    def take(name: str, source: Weights) -> None:
        whole = partial(_whole, source)
        init_parameter(strategy, name, select_trained_experts(whole, own, experts) if own is not None else whole)

    for name, parameter in strategy.trainable_parameters.items():  # one at a time: copies are of one
        told = None if name in kept else since
        was = parameter.clone() if told is not None or kept.get(name) else None
        take(name, weights)
        if was is None:
            continue
        if told is None:
            parameter.lerp_(was, kept[name])
            continue
        new = parameter.clone()
        take(name, told)
        parameter.neg_().add_(new).add_(was)  # in this order nothing is rounded where both are the same
    init_frozen_experts(strategy.module, partial(_whole, weights), experts)
    strategy.sync_model_weights()


def _whole(weights: Weights, name: str, shape: torch.Size) -> Tensor:
    """A parameter, from its pieces."""
    if STACKED not in name:
        return weights(ModelPiece(name, tuple(shape)))
    return torch.stack([weights(ModelPiece(name, tuple(shape[1:]), expert)) for expert in range(shape[0])])


@torch.no_grad()
def held_bytes(strategy: Strategy, optimizers: Sequence[torch.optim.Optimizer]) -> int:
    """Of weights, gradients and optimizer state that this rank holds now, and of experts that rest, each storage
    once; not of what is offloaded."""
    held = strategy.resident_tensors(optimizers)
    resting = [part for part in strategy.module.modules() if isinstance(part, FrozenExpertWeights)]
    tensors = [tensor for part in ("parameters", "gradients", "optimizer") for tensor in held.get(part, ())]
    tensors += [numbers for part in resting for numbers in part.buffers()]
    storages = [local_tensor(tensor).untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

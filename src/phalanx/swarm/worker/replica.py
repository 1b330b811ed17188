"""Access to a node's model over all of its ranks and for any layout.

Weights or gradients are written to a file of full parameters, and every rank reads its part of weights from a file.

Why: `docs/design/decisions/swarm-ddp-optimizer.md`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
from phalanx.spec.run import RunSpec
from phalanx.swarm.pieces import STACKED_EXPERTS_INFIX, ModelPiece, fragment_pieces
from phalanx.swarm.tensor_files import TensorFile
from phalanx.swarm.update_files import Weights
from phalanx.swarm.worker.round_plan import RoundPlan
from phalanx.train.learner import Learner


def write_weights(
    strategy: Strategy, mesh: Mesh, trained_experts: TrainedExperts | None, num_experts: int, file: TensorFile
) -> None:
    """Write the trained parameters to a file of full parameters."""
    experts = trained_experts.experts if trained_experts is not None else range(num_experts)
    _write_tensors(strategy, mesh, experts, strategy.trainable_parameters, file)


class GradientCapture(torch.optim.Optimizer):
    """Optimizer of a node whose coordinator steps (ddp).

    It changes no parameter, and writes the gradients to a file of full parameters, all at once or in the strategy's
    groups.
    """

    def __init__(self, learner: Learner, path: Path) -> None:
        parameters = list(learner.strategy.trainable_parameters.values())
        super().__init__(parameters, {"lr": learner.run.optimizer.learning_rate})
        self.strategy = learner.strategy
        self.mesh = learner.mesh
        self.path = path
        self.experts = range(learner.run.model.moe.num_experts if learner.run.model.moe else 0)

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Write the present gradients to the file."""
        parameters = self.strategy.trainable_parameters
        gradients = {name: parameter.grad for name, parameter in parameters.items() if parameter.grad is not None}
        with TensorFile(self.path, writable=True) as file:
            _write_tensors(self.strategy, self.mesh, self.experts, gradients, file)


@torch.no_grad()
def _write_tensors(
    strategy: Strategy, mesh: Mesh, experts: Sequence[int], tensors: Mapping[str, Tensor], file: TensorFile
) -> None:
    """Write tensors with the shapes of trained parameters, each on the first rank that has it.

    Shards of a parameter on several ranks are gathered, so all ranks must call this function.
    """
    coordinates = mesh.dims.coordinates(mesh.rank)
    is_writer = not any(coordinates[axis] for axis in coordinates if axis != "pp")
    for name, tensor in tensors.items():
        global_tensor = strategy.model_parallel.as_global_dtensor(name, tensor.detach())
        full_tensor = global_tensor.full_tensor() if isinstance(global_tensor, DTensor) else global_tensor
        if not is_writer:
            continue
        if STACKED_EXPERTS_INFIX in name:
            for index, expert in enumerate(experts):
                file.write(ModelPiece(name, tuple(full_tensor.shape[1:]), expert), full_tensor[index])
        else:
            file.write(ModelPiece(name, tuple(full_tensor.shape)), full_tensor)


@torch.no_grad()
def read_weights(
    strategy: Strategy,
    trained_experts: TrainedExperts | None,
    num_experts: int,
    weights: Weights,
    blend_factors: Mapping[str, float],
    sent_weights: Weights | None = None,
) -> None:
    """Read trained and frozen weights.

    `blend_factors` are the fractions of its local value that a parameter keeps. To a parameter without a factor, the
    local change since `sent_weights` is added.
    """

    def load_parameter(name: str, source: Weights) -> None:
        read: Callable[[str, torch.Size], Tensor] = partial(_read_parameter, source)
        if trained_experts is not None:
            read = select_trained_experts(read, trained_experts, num_experts)
        init_parameter(strategy, name, read)

    # Parameters are read one at a time, so that copies are small.
    for name, parameter in strategy.trainable_parameters.items():
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
        # in this order, equal values are not rounded
        parameter.neg_().add_(received_value).add_(local_value)
    init_frozen_experts(strategy.module, partial(_read_parameter, weights), num_experts)
    strategy.sync_model_weights()


def blend_factors(run: RunSpec, updated_rounds: range, plan: RoundPlan) -> dict[str, float]:
    """Return the fraction of its local value that each parameter keeps when it receives results.

    It is 1 for fragments that were not updated, and for the node's own experts whose update is final. For a node
    that continued training after its update, it is `mixing` if that is set.
    """
    swarm = run.swarm
    assert swarm is not None
    updated_fragments = {round_number % swarm.fragments for round_number in updated_rounds}
    factors = {}
    for fragment in range(swarm.fragments):
        is_unchanged = fragment not in updated_fragments and swarm.fragments > 1
        for piece in fragment_pieces(run.model, fragment, swarm.fragments):
            if is_unchanged or (plan.keeps_local_experts and piece.expert is not None):
                factors[piece.name] = 1.0
            elif plan.keeps_local_steps and swarm.mixing is not None:
                factors[piece.name] = swarm.mixing
    return factors


def _read_parameter(weights: Weights, name: str, shape: torch.Size) -> Tensor:
    """Return a parameter from its pieces."""
    if STACKED_EXPERTS_INFIX not in name:
        return weights(ModelPiece(name, tuple(shape)))
    return torch.stack([weights(ModelPiece(name, tuple(shape[1:]), expert)) for expert in range(shape[0])])


@torch.no_grad()
def resident_bytes(strategy: Strategy, optimizers: Sequence[torch.optim.Optimizer]) -> int:
    """Return the resident bytes of weights, gradients, optimizer state and frozen experts on this rank.

    Each storage counts once. Offloaded state is excluded.
    """
    resident = strategy.resident_tensors(optimizers)
    frozen_modules = [module for module in strategy.module.modules() if isinstance(module, FrozenExpertWeights)]
    tensors = [tensor for part in ("parameters", "gradients", "optimizer") for tensor in resident.get(part, ())]
    tensors += [buffer for module in frozen_modules for buffer in module.buffers()]
    storages = [local_tensor(tensor).untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

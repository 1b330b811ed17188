"""Initial values of the parameters that a rank trains."""

from __future__ import annotations

import torch

from phalanx.model.init import DrawnWeights, Weights, part_of_weight, quantized_part
from phalanx.parallel.dtensor_shards import local_shape_and_offset, local_tensor
from phalanx.parallel.module_tensors import named_buffers
from phalanx.parallel.strategy import Strategy
from phalanx.spec.parts.model import carried_tensors


def init_parameters(strategy: Strategy, weights: Weights) -> None:
    """Initialize the parameters, one at a time."""
    for name in strategy.stored_parameters:
        init_parameter(strategy, name, weights)


def init_buffers(strategy: Strategy, weights: Weights) -> None:
    """Initialize carried tensors, and biases of routers and scalars of layers, of which new ones are 0 and 1."""
    for name, buffer in named_buffers(strategy.module):
        if not isinstance(weights, DrawnWeights) or name in carried_tensors(weights.spec):
            buffer.copy_(weights(name, buffer.shape))
        elif name.endswith(".layer_scalar"):
            buffer.fill_(1)


@torch.no_grad()
def init_parameter(strategy: Strategy, name: str, weights: Weights) -> None:
    """Initialize one parameter, of which a rank draws or reads only the part that it has."""
    dtensor = strategy.model_parallel.as_global_dtensor(name, strategy.stored_parameters[name].detach())
    local_slices = tuple(
        slice(offset, offset + size) for size, offset in zip(*local_shape_and_offset(dtensor), strict=True)
    )
    local = local_tensor(dtensor)
    if local.is_floating_point():
        local.copy_(part_of_weight(weights, name, dtensor.shape, local_slices))
    else:
        local.copy_(quantized_part(weights, name, dtensor.shape, local_slices))

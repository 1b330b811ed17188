"""Initial values of the parameters that a rank trains."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from phalanx.model.init import DrawnWeights
from phalanx.parallel.dtensor_shards import local_shape_and_offset, local_tensor
from phalanx.parallel.module_tensors import named_buffers
from phalanx.parallel.strategy import Strategy
from phalanx.spec.parts.model import carried_tensors

WeightInitializer = Callable[[str, torch.Size], Tensor]
"""Returns the value of a full parameter, by its name and shape."""


def init_parameters(strategy: Strategy, weights: WeightInitializer) -> None:
    """Initialize the trained parameters, one at a time."""
    for name in strategy.trainable_parameters:
        init_parameter(strategy, name, weights)


def init_buffers(strategy: Strategy, weights: WeightInitializer) -> None:
    """Initialize carried tensors, and biases of routers and scalars of layers, of which new ones are 0 and 1."""
    for name, buffer in named_buffers(strategy.module):
        if not isinstance(weights, DrawnWeights) or name in carried_tensors(weights.spec):
            buffer.copy_(weights(name, buffer.shape))
        elif name.endswith(".layer_scalar"):
            buffer.fill_(1)


@torch.no_grad()
def init_parameter(strategy: Strategy, name: str, weights: WeightInitializer) -> None:
    """Initialize one trained parameter; a rank draws only the rows of `DrawnWeights` that it trains."""
    dtensor = strategy.model_parallel.as_global_dtensor(name, strategy.trainable_parameters[name].detach())
    local_slices = tuple(
        slice(offset, offset + size) for size, offset in zip(*local_shape_and_offset(dtensor), strict=True)
    )
    if isinstance(weights, DrawnWeights) and dtensor.ndim > 1:
        full = weights.draw(name, dtensor.shape, range(local_slices[0].start, local_slices[0].stop))
    else:
        full = weights(name, dtensor.shape)
    local_tensor(dtensor).copy_(full[local_slices])

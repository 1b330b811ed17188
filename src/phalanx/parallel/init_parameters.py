"""Initial values of the parameters that a rank trains."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from phalanx.model.init import DrawnWeights
from phalanx.parallel.dtensor_shards import local_shape_and_offset, local_tensor
from phalanx.parallel.strategy import Strategy

WeightInitializer = Callable[[str, torch.Size], Tensor]
"""Returns the value of a full parameter, by its name and shape."""


def init_parameters(strategy: Strategy, weights: WeightInitializer) -> None:
    """Initialize the trained parameters, one at a time."""
    for name in strategy.trainable_parameters:
        init_parameter(strategy, name, weights)


@torch.no_grad()
def init_parameter(strategy: Strategy, name: str, weights: WeightInitializer) -> None:
    """Initialize one trained parameter; a rank draws only the rows of `DrawnWeights` that it trains."""
    part = strategy.model_parallel.as_global_dtensor(name, strategy.trainable_parameters[name].detach())
    own = tuple(slice(begin, begin + size) for size, begin in zip(*local_shape_and_offset(part), strict=True))
    if isinstance(weights, DrawnWeights) and part.ndim > 1:
        full = weights.draw(name, part.shape, range(own[0].start, own[0].stop))
    else:
        full = weights(name, part.shape)
    local_tensor(part).copy_(full[own])

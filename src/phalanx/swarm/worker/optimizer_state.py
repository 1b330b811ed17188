"""What an optimizer knows of parameters, taken along when a node trains other experts than before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from phalanx.swarm.pieces import STACKED
from phalanx.train.learner import Learner

Moments = dict[str, dict[str, Any]]
"""An optimizer's state of parameters, by their names."""


def optimizer_moments(learner: Learner) -> Moments:
    """What the optimizers know."""
    return {
        name: optimizer.state[parameter]
        for name, parameter in learner.strategy.trainable_parameters.items()
        for optimizer in learner.optimizers
        if parameter in optimizer.state
    }


@torch.no_grad()
def transfer_moments(known: Moments, had: Sequence[int], new: Learner, has: Sequence[int]) -> None:
    """Give the optimizers of `new` what was known of parameters that it trains whole on this rank, too, and of stacks
    of experts for those in both. What is new begins anew; so do experts of ranks that have different ones, or some rows
    of them."""
    apart = new.run.layout.ep > 1
    for name, parameter in new.strategy.trainable_parameters.items():
        for optimizer in new.optimizers:
            mine = any(parameter is each for group in optimizer.param_groups for each in group["params"])
            if not mine or name not in known:
                continue
            state = known[name]
            if STACKED not in name:
                optimizer.state[parameter] = state
            elif not (apart or isinstance(parameter, DTensor)):
                optimizer.state[parameter] = {
                    key: _of_experts(value, had, has) if isinstance(value, Tensor) and value.ndim else value
                    for key, value in state.items()
                }


def _of_experts(stacked: Tensor, had: Sequence[int], has: Sequence[int]) -> Tensor:
    found = stacked.new_zeros(len(has), *stacked.shape[1:])
    for place, expert in enumerate(has):
        if expert in had:
            found[place] = stacked[list(had).index(expert)]
    return found

"""Transfer of optimizer state when a node trains other experts than before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from phalanx.swarm.pieces import STACKED_EXPERTS_INFIX
from phalanx.train.learner import Learner

Moments = dict[str, dict[str, Any]]
"""State of an optimizer by the names of its parameters."""


def optimizer_moments(learner: Learner) -> Moments:
    """Return the state of the learner's optimizers."""
    return {
        name: optimizer.state[parameter]
        for name, parameter in learner.strategy.trainable_parameters.items()
        for optimizer in learner.optimizers
        if parameter in optimizer.state
    }


@torch.no_grad()
def transfer_moments(
    moments: Moments, old_experts: Sequence[int], learner: Learner, new_experts: Sequence[int]
) -> None:
    """Copy optimizer state to the optimizers of another learner.

    State is copied for parameters that this rank trains in full, and in stacks of experts for the experts of both
    learners. State of new experts starts at zero. Experts are not copied if ranks have different ones or only rows of
    them. `moments` are the state of the old optimizers.
    """
    is_expert_parallel = learner.run.layout.ep > 1
    for name, parameter in learner.strategy.trainable_parameters.items():
        for optimizer in learner.optimizers:
            is_managed = any(parameter is managed for group in optimizer.param_groups for managed in group["params"])
            if not is_managed or name not in moments:
                continue
            state = moments[name]
            if STACKED_EXPERTS_INFIX not in name:
                optimizer.state[parameter] = state
            elif not (is_expert_parallel or isinstance(parameter, DTensor)):
                optimizer.state[parameter] = {
                    key: _select_experts(value, old_experts, new_experts)
                    if isinstance(value, Tensor) and value.ndim
                    else value
                    for key, value in state.items()
                }


def _select_experts(stacked: Tensor, old_experts: Sequence[int], new_experts: Sequence[int]) -> Tensor:
    selected = stacked.new_zeros(len(new_experts), *stacked.shape[1:])
    for index, expert in enumerate(new_experts):
        if expert in old_experts:
            selected[index] = stacked[list(old_experts).index(expert)]
    return selected

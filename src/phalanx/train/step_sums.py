"""The message of a training step: the values that ranks sum, by name."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from phalanx.cost.exact.scalar_reductions import NUM_SCALARS


@dataclass(frozen=True, kw_only=True)
class StepSums:
    """Values of one rank in a step, or their sums over ranks.

    The fields are views of one fp64 vector: adding to a field changes `packed`, which ranks sum in one collective."""

    tokens: Tensor
    """Number of targets: tokens whose target is not ignored."""
    loss: Tensor
    """Loss, summed over tokens."""
    auxiliary_loss: Tensor
    """Balance and z-losses of experts, summed over tokens."""
    mtp_loss: Tensor
    """Mean of the losses of the layers for multi-token prediction, summed over tokens."""
    stop_requests: Tensor
    """Number of ranks that received a signal to stop."""
    finish_requests: Tensor
    """Number of ranks whose callbacks request the end of the run."""
    pending_saves: Tensor
    """Number of ranks that save a checkpoint in the background."""
    stop_step: Tensor
    """Step after which all ranks stop, announced by an asynchronous server; 0: none."""
    dropped_choices: Tensor
    """Number of choices of experts that exceeded a capacity."""
    expert_loads: Tensor
    """Number of choices of each expert, [layers with experts, E]."""
    packed: Tensor
    """All values: the scalars, then the loads."""

    @classmethod
    def unpack(cls, packed: Tensor, load_shape: tuple[int, int]) -> StepSums:
        """Name the values of a vector without copying it. `load_shape` is [layers with experts, experts]."""
        # A slice, since iterating over the whole vector would make a view of each expert's load.
        scalars = dict(zip(SCALARS, packed[: len(SCALARS)], strict=True))
        return cls(**scalars, expert_loads=packed[len(SCALARS) :].view(load_shape), packed=packed)

    @classmethod
    def zeros(cls, load_shape: tuple[int, int], device: torch.device) -> StepSums:
        """Return sums of zero on the device."""
        num_layers, num_experts = load_shape
        values = torch.zeros(len(SCALARS) + num_layers * num_experts, dtype=torch.float64, device=device)
        return cls.unpack(values, load_shape)


SCALARS = tuple(field.name for field in fields(StepSums))[:NUM_SCALARS]

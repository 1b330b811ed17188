"""The message of a training step: the values that ranks sum, by name."""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import prod

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
    source_losses: Tensor
    """Loss of each source of a mixture, summed over tokens, [sources]."""
    source_targets: Tensor
    """Number of targets of each source, [sources]."""
    preferences: Tensor
    """Number of pairs, of those whose chosen answer has the higher reward, and the sum of the differences of rewards,
    [3]; [0] unless the run is on preferences."""
    expert_loads: Tensor
    """Number of choices of each expert, [layers with experts, E]."""
    packed: Tensor
    """All values: the scalars, the sources, preferences, then the loads."""

    @classmethod
    def unpack(cls, packed: Tensor, num_sources: int, num_preferences: int, load_shape: tuple[int, int]) -> StepSums:
        """Name the values of a vector without copying it. `load_shape` is [layers with experts, experts]."""
        sizes = [len(SCALARS), num_sources, num_sources, num_preferences, prod(load_shape)]
        scalars, losses, targets, preferences, loads = packed.split(sizes)
        arrays = {"source_losses": losses, "source_targets": targets, "preferences": preferences}
        arrays["expert_loads"] = loads.view(load_shape)
        return cls(**dict(zip(SCALARS, scalars, strict=True)), **arrays, packed=packed)

    @classmethod
    def zeros(
        cls, num_sources: int, num_preferences: int, load_shape: tuple[int, int], device: torch.device
    ) -> StepSums:
        """Return sums of zero on the device."""
        length = len(SCALARS) + 2 * num_sources + num_preferences + prod(load_shape)
        packed = torch.zeros(length, dtype=torch.float64, device=device)
        return cls.unpack(packed, num_sources, num_preferences, load_shape)


SCALARS = tuple(field.name for field in fields(StepSums))[:NUM_SCALARS]

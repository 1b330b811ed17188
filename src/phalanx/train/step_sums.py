"""The message of a training step: the values that ranks sum, by name."""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import prod

import torch
from torch import Tensor

from phalanx.cost.exact.scalar_reductions import NUM_SCALARS, num_distillation_sums, num_preference_sums
from phalanx.spec.run import RunSpec


@dataclass(frozen=True, kw_only=True)
class StepSums:
    """Values of one rank in a step, or their sums over ranks.

    The fields are views of one fp64 vector: adding to a field changes `packed`, which ranks sum in one collective."""

    tokens: Tensor
    """Number of targets, each counted by its weight: tokens whose target is not ignored."""
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
    divergences: Tensor
    """KL(teacher || student), summed over tokens, [1]; [0] without distillation."""
    expert_loads: Tensor
    """Number of choices of each expert, [layers with experts, E]."""
    packed: Tensor
    """All values: the scalars, the sources, preferences, divergences, then the loads."""

    @classmethod
    def unpack(cls, packed: Tensor, run: RunSpec, load_shape: tuple[int, int]) -> StepSums:
        """Name the values of a vector without copying it. `load_shape` is [layers with experts, experts]."""
        scalars, losses, targets, preferences, divergences, loads = packed.split(_sizes(run, load_shape))
        arrays = {"source_losses": losses, "source_targets": targets, "preferences": preferences}
        arrays |= {"divergences": divergences, "expert_loads": loads.view(load_shape)}
        return cls(**dict(zip(SCALARS, scalars, strict=True)), **arrays, packed=packed)

    @classmethod
    def zeros(cls, run: RunSpec, load_shape: tuple[int, int], device: torch.device) -> StepSums:
        """Return sums of zero on the device."""
        packed = torch.zeros(sum(_sizes(run, load_shape)), dtype=torch.float64, device=device)
        return cls.unpack(packed, run, load_shape)


def _sizes(run: RunSpec, load_shape: tuple[int, int]) -> list[int]:
    """Return the numbers of scalars, losses and targets of sources, values of preferences, divergences, and loads."""
    num_sources = len(run.data.source)
    return [
        len(SCALARS),
        num_sources,
        num_sources,
        num_preference_sums(run),
        num_distillation_sums(run),
        prod(load_shape),
    ]


SCALARS = tuple(field.name for field in fields(StepSums))[:NUM_SCALARS]

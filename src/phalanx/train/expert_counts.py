"""Counts of tokens per expert over all ranks, for metrics and for the routers' biases."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from phalanx.model.moe import Router
from phalanx.runs.metrics import MetricsRecord
from phalanx.train.step_sums import StepSums


class ExpertCounts:
    """How many tokens chose each expert, over all ranks: since the last evaluation, and in the interval before it."""

    def __init__(self, layers: list[int], num_experts: int, device: torch.device) -> None:
        """Start at zero; `layers` are the numbers of the layers with experts."""
        self.layers = layers
        self.intervals = torch.zeros(2, len(layers), num_experts, dtype=torch.float64, device=device)
        """Counts [2, L, E] of the current interval and of the previous one."""

    @property
    def load_shape(self) -> tuple[int, int]:
        """Number of layers with experts, and number of experts per layer."""
        return self.intervals.shape[1], self.intervals.shape[2]

    @property
    def current(self) -> Tensor:
        """Counts since the last evaluation, [L, E]."""
        return self.intervals[0]

    def add(self, loads: Tensor, routers: dict[int, Router], multiplicity: int, update_biases: bool) -> None:
        """Add the loads of a step, [L, E] over all ranks, and set the biases of this rank's routers by them.

        `multiplicity` is the number of ranks whose routers count the same choice. Biases are unchanged if the step was
        skipped, or if this rank receives them from a server."""
        self.current.add_(loads / multiplicity)
        for index, router in routers.items():
            router.load.copy_(loads[index])
            router.update_bias(update_biases)

    def start_interval(self) -> None:
        """Make the current interval the previous one, and count from zero."""
        self.intervals = torch.stack([torch.zeros_like(self.current), self.current])

    def load_state(self, intervals: list[list[list[int]]]) -> None:
        """Restore the counts of a checkpoint."""
        self.intervals.copy_(torch.tensor(intervals))


def hottest_expert(loads: Tensor, layers: list[int]) -> tuple[int, int, float]:
    """Return layer, number and relative load of the expert with the most choices relative to its layer's mean.

    `loads` are the choices of each expert, [L, E], in host memory, `layers` the numbers of the L layers."""
    relative_loads = loads / loads.mean(1, keepdim=True)
    index, expert = divmod(int(relative_loads.argmax()), relative_loads.shape[1])
    return layers[index], expert, float(relative_loads[index, expert])


def expert_metrics(sums: StepSums, hottest: tuple[int, int, float], has_capacity: bool) -> MetricsRecord:
    """Return the metrics of experts in a step, from sums in host memory and the result of `hottest_expert`."""
    metrics: MetricsRecord = {}
    if has_capacity:
        metrics["dropped_share"] = float(sums.dropped_choices) / float(sums.expert_loads.sum())
    auxiliary_loss = float(sums.auxiliary_loss) / float(sums.tokens) if sums.tokens else math.nan
    return metrics | {"auxiliary_loss": auxiliary_loss, "hot_expert_share": hottest[2]}

"""What parameters, gradients and optimizer state take in memory, before any sharding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from phalanx.cost.parameters import ParameterCount

Optimizer = Literal["sgd", "sgd-momentum", "adamw", "muon"]
Precision = Literal["bf16", "fp32", "fp64"]

STATES: dict[Optimizer, int] = {"sgd": 0, "sgd-momentum": 1, "adamw": 2, "muon": 1}
"""Numbers that an optimizer keeps per parameter: none, a momentum, Adam's two moments, Muon's momentum."""


@dataclass(frozen=True)
class StateBytes:
    """Bytes of model state by part: of one parameter, or times a count, of a whole model."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """Bytes that training holds from step to step."""
        return self.parameters + self.gradients + self.optimizer

    def __mul__(self, count: int) -> StateBytes:
        return StateBytes(self.parameters * count, self.gradients * count, self.optimizer * count)

    def __add__(self, more: StateBytes) -> StateBytes:
        optimizer = self.optimizer + more.optimizer
        return StateBytes(self.parameters + more.parameters, self.gradients + more.gradients, optimizer)


PUBLISHED_MIXED_PRECISION_ADAM = StateBytes(parameters=2, gradients=2, optimizer=12)
"""The 16 bytes of the literature (ZeRO, arXiv 1910.02054, section 3.1): half-precision parameters and
gradients, and an fp32 master copy among the optimizer's state. Phalanx's bf16 has 16 too, cut otherwise."""


def state_bytes(optimizer: Optimizer, precision: Precision) -> StateBytes:
    """Bytes per parameter that Phalanx keeps; multiply by a count of parameters.

    Parameters, gradients and state are fp32 for bf16 and fp32 alike: the bf16 copies that the products read
    are made when needed and dropped. fp64 doubles everything. "muon" is a parameter that Muon itself trains.
    """
    number = 8 if precision == "fp64" else 4
    return StateBytes(number, number, STATES[optimizer] * number)


def model_state_bytes(count: ParameterCount, optimizer: Optimizer, precision: Precision) -> StateBytes:
    """Bytes of a model's whole state. With muon, AdamW trains what is not a matrix inside a block."""
    if optimizer != "muon":
        return state_bytes(optimizer, precision) * count.total
    rest = count.total - count.block_matrices
    return state_bytes("muon", precision) * count.block_matrices + state_bytes("adamw", precision) * rest

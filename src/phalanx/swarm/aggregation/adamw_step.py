"""AdamW step of the coordinator on one piece of the model, with the mean gradient of the nodes (ddp).

The coordinator is a parameter server (Li et al., OSDI 2014): it keeps the moments, and nodes have none.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from phalanx.spec.run import OptimizerSpec
from phalanx.swarm.pieces import ModelPiece
from phalanx.train.optim.optimizers import build_optimizers, set_learning_rate

MOMENTS = ("exp_avg", "exp_avg_sq")
"""State of AdamW, with PyTorch's names."""


@dataclass(frozen=True)
class AdamWStep:
    """The AdamW step of one round."""

    optimizer: OptimizerSpec
    lr_ratio: float
    """Learning rate as a fraction of the peak."""
    num_earlier_steps: int

    def step(self, piece: ModelPiece, weights: Tensor, gradient: Tensor, moments: dict[str, Tensor]) -> None:
        """Update a piece's weights and moments in place.

        The optimizer is that of a trainer of the full model: rows of a matrix, and experts of a stack, have its weight
        decay. `gradient` is the mean gradient, `moments` are by name (`MOMENTS`).
        """
        parameter = nn.Parameter(weights)
        parameter.grad = gradient
        optimizers = build_optimizers(self.optimizer, {piece.name: parameter})
        optimizers[0].state[parameter] = {"step": torch.tensor(float(self.num_earlier_steps)), **moments}
        set_learning_rate(optimizers, self.lr_ratio)
        optimizers[0].step()

"""A step of the run's own optimizer on one piece of the model: what a coordinator makes of the mean gradient of its
nodes (ddp). It is a parameter server (Li et al., OSDI 2014): moments are kept here, and nodes have none."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from phalanx.spec.run import OptimizerSpec
from phalanx.swarm.pieces import ModelPiece
from phalanx.train.optim.optimizers import build_optimizers, set_learning_rate

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Of AdamW, as PyTorch names them."""


@dataclass(frozen=True)
class AdamWStep:
    """AdamW of one round."""

    optimizer: OptimizerSpec
    ratio: float
    """Of the peak learning rate."""
    steps: int
    """That were done before."""

    def step(self, piece: ModelPiece, weights: Tensor, gradient: Tensor, moments: dict[str, Tensor]) -> None:
        """Step a piece's weights and moments in place, by the optimizer that a trainer has of the whole: some rows of a
        matrix, or a stack's expert, decay as these do."""
        parameter = nn.Parameter(weights)
        parameter.grad = gradient
        optimizers = build_optimizers(self.optimizer, {piece.name: parameter})
        optimizers[0].state[parameter] = {"step": torch.tensor(float(self.steps)), **moments}
        set_learning_rate(optimizers, self.ratio)
        optimizers[0].step()

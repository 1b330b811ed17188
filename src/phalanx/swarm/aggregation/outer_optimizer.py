"""The outer optimizer: what becomes of the weights that a round began with, and what its nodes made of them.

With a learning rate of 1 and no momentum the new weights are the mean of the nodes' (FedAvg, arXiv 1602.05629);
DiLoCo's is Nesterov's with 0.7 and 0.9 (arXiv 2311.08105, algorithm 1)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class OuterSGD:
    """SGD with Nesterov momentum on pseudo-gradients, as torch.optim.SGD does it."""

    learning_rate: float = 1.0
    momentum: float = 0.0

    @property
    def is_plain_mean(self) -> bool:
        """Whether it is none: the mean is taken as it is."""
        return self.learning_rate == 1 and self.momentum == 0

    def step(self, base: Tensor, mean: Tensor, velocity: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """New weights, and the velocity to keep, from those of the round's beginning, and the mean of what the nodes
        made of them: v = mu v + D, theta - eta (D + mu v), where D = theta - mean."""
        if self.is_plain_mean:
            return mean, None
        gradient = base - mean
        velocity = gradient if velocity is None else self.momentum * velocity + gradient
        return base - self.learning_rate * (gradient + self.momentum * velocity), velocity

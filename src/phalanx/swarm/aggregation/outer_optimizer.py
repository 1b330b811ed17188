"""Outer optimizer: new weights from a round's initial weights and the mean of the nodes' weights.

With a learning rate of 1 and no momentum the new weights are that mean (FedAvg, arXiv 1602.05629). DiLoCo uses
Nesterov momentum with 0.7 and 0.9 (arXiv 2311.08105, algorithm 1).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class OuterSGD:
    """SGD with Nesterov momentum on pseudo-gradients, equal to torch.optim.SGD."""

    learning_rate: float = 1.0
    momentum: float = 0.0

    @property
    def is_plain_mean(self) -> bool:
        """True if the step returns the mean unchanged."""
        return self.learning_rate == 1 and self.momentum == 0

    def step(self, base: Tensor, mean: Tensor, velocity: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the new weights and the new velocity.

        v = mu v + D, theta - eta (D + mu v), where D = theta - mean. theta is `base`, the weights at the start of the
        round, and v the velocity of the round before, if there is one.
        """
        if self.is_plain_mean:
            return mean, None
        gradient = base - mean
        velocity = gradient if velocity is None else self.momentum * velocity + gradient
        return base - self.learning_rate * (gradient + self.momentum * velocity), velocity

"""Result of a strategy's training step."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class StepResult:
    """A step over all ranks; scalars on the device. Reading their values waits for the device.

    Example:
        >>> strategy = phalanx.distribute(torch.nn.Linear(4, 1), phalanx.Layout())
        >>> optimizer = torch.optim.SGD(strategy.trainable_parameters.values(), lr=0.1)
        >>> with strategy.accumulate():
        ...     loss = strategy.model(torch.ones(8, 4)).square().sum()
        ...     loss.backward()
        >>> result = strategy.step([optimizer], loss, num_tokens=8)
        >>> bool(result.loss == loss / 8), int(result.num_tokens)
        (True, 8)"""

    loss: Tensor
    """The mean over `num_tokens`."""
    grad_norm: Tensor
    """The norm of the gradient of the mean loss, before clipping."""
    num_tokens: Tensor
    """The sum over all ranks."""

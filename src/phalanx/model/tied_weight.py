"""The matrix that the embedding and the head share, in a model on one rank.

Autograd would keep the gradient of the head until that of the embedding exists, and write their sum to a third tensor
unless it can prove that nobody else reads the first. Here the second becomes the sum."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, autograd
from torch.autograd.function import once_differentiable


class TiedWeight:
    """The two uses of a matrix [V, D] in one forward pass: the last backward pass is that of the embedding."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight
        self.head_gradient: Tensor | None = None

    def of_embedding(self) -> Tensor:
        """Return the matrix for the embedding. Its gradient becomes that of both uses."""
        return cast(Tensor, _EmbeddingUse.apply(self, self.weight))

    def of_head(self) -> Tensor:
        """Return the matrix for the head. Its gradient waits for that of the embedding."""
        return cast(Tensor, _HeadUse.apply(self, self.weight))


class _Use(autograd.Function):
    @staticmethod
    def forward(ctx: Any, tied: TiedWeight, weight: Tensor) -> Tensor:
        ctx.tied = tied
        return weight.view_as(weight)


class _EmbeddingUse(_Use):
    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        head_gradient, ctx.tied.head_gradient = ctx.tied.head_gradient, None
        return None, gradient if head_gradient is None else gradient.add_(head_gradient)


class _HeadUse(_Use):
    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        ctx.tied.head_gradient = gradient
        return None, None

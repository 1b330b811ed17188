"""Split backward passes (zero bubble, arXiv 2401.10241): input gradients now, weight gradients later.

The previous stage waits for the gradient of a stage's input; nothing waits for the gradients of its weights.

Linear layers and experts, which have nearly all of the work, defer the second half. They save its operands, the layer's
input and the gradient of its output. Autograd's own graph is complete after the first half.

Why: `docs/design/decisions/split-backward.md`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.model.moe import Experts, rows_per_expert, supports_grouped_mm
from phalanx.model.transformer import Transformer

WeightGradient = tuple[Tensor, Callable[[], Tensor]]
"""A weight as it was used (perhaps a cast or part of a parameter), and a function for its gradient."""


class DeferredWeightGrads:
    """The list to which the layers of a model append deferred weight gradients."""

    def __init__(self) -> None:
        self.deferred: list[WeightGradient] | None = None
        """None while gradients are computed immediately."""

    @contextmanager
    def deferring(self) -> Iterator[list[WeightGradient]]:
        """Defer weight gradients in the first half of a backward pass, and yield their list."""
        self.deferred = []
        try:
            yield self.deferred
        finally:
            self.deferred = None

    def defer_or_compute(self, weight: Tensor, gradient: Callable[[], Tensor]) -> Tensor | None:
        """Return the gradient of a weight, or None if it is deferred."""
        if self.deferred is None:
            return gradient()
        self.deferred.append((weight, gradient))
        return None


def compute_weight_grads(deferred: list[WeightGradient]) -> None:
    """Compute the deferred gradients: the second half of a backward pass.

    Gradients reach the parameters and their hooks as in any backward pass."""
    weights = [weight for weight, _ in deferred]
    gradients = []
    while deferred:
        _, gradient = deferred.pop(0)
        gradients.append(gradient())
    if weights:
        torch.autograd.backward(weights, gradients)


def split_backward(module: Transformer, deferred_grads: DeferredWeightGrads) -> None:
    """Make the linear layers and experts of a model defer their weight gradients into `deferred_grads`."""
    if "logits" not in vars(module):
        module.logits = partial(split_backward_linear, deferred_grads=deferred_grads)  # type: ignore[method-assign]
    for part in module.modules():
        if isinstance(part, nn.Linear):
            part.forward = partial(_split_linear, part, deferred_grads)  # type: ignore[method-assign]
        elif isinstance(part, Experts):
            part.product = partial(_split_grouped_product, part.product, deferred_grads)  # type: ignore[method-assign]


def split_backward_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, deferred_grads: DeferredWeightGrads
) -> Tensor:
    """Return x W^T + b; the gradient of the weight may be deferred.

    Args:
        x: Input, [..., I].
        weight: W, [O, I].
        bias: b, [O]; None without bias.
        deferred_grads: List that receives the gradient of the weight while it defers gradients.
    """
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x = x.to(dtype)
        weight = weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    return _Linear.apply(x, weight, bias, deferred_grads)


def _split_linear(layer: nn.Linear, deferred_grads: DeferredWeightGrads, x: Tensor) -> Tensor:
    return split_backward_linear(x, layer.weight, layer.bias, deferred_grads=deferred_grads)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, deferred_grads: DeferredWeightGrads
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        ctx.deferred_grads = deferred_grads
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        (x,) = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad

        def compute_weight_grad() -> Tensor:
            return grad.flatten(0, -2).T @ x.flatten(0, -2)

        grad_weight = ctx.deferred_grads.defer_or_compute(ctx.weight, compute_weight_grad) if needs_weight else None
        grad_bias = grad.flatten(0, -2).sum(0) if needs_bias else None
        return grad @ ctx.weight if needs_x else None, grad_weight, grad_bias, None


def _split_grouped_product(
    product: Callable[..., Tensor],
    deferred_grads: DeferredWeightGrads,
    x_ND: Tensor,
    weight_EOI: Tensor,
    offsets_E: Tensor,
) -> Tensor:
    return _GroupedLinear.apply(x_ND, weight_EOI, offsets_E, product, deferred_grads)


class _GroupedLinear(torch.autograd.Function):
    """The experts' product, with separate rows for each expert."""

    @staticmethod
    def forward(
        ctx: Any,
        x_ND: Tensor,
        weight_EOI: Tensor,
        offsets_E: Tensor,
        product: Callable[..., Tensor],
        deferred_grads: DeferredWeightGrads,
    ) -> Tensor:
        ctx.save_for_backward(x_ND, offsets_E)
        ctx.weight = weight_EOI
        ctx.product = product
        ctx.deferred_grads = deferred_grads
        return product(x_ND, weight_EOI, offsets_E)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        x_ND, offsets_E = ctx.saved_tensors
        weight = ctx.weight
        product = ctx.product

        def compute_weight_grad() -> Tensor:
            return _grouped_outer_product(grad.contiguous(), x_ND, weight, offsets_E=offsets_E)

        grad_weight = (
            ctx.deferred_grads.defer_or_compute(weight, compute_weight_grad) if ctx.needs_input_grad[1] else None
        )
        grad_x = (
            product(grad.contiguous(), weight.detach().transpose(1, 2), offsets_E) if ctx.needs_input_grad[0] else None
        )
        return grad_x, grad_weight, None, None, None


def _grouped_outer_product(grad_NO: Tensor, x_NI: Tensor, weight_EOI: Tensor, offsets_E: Tensor) -> Tensor:
    """Return each expert's gradient rows times its input rows: [E, O, I]."""
    if supports_grouped_mm(x_NI, weight_EOI):
        return F.grouped_mm(grad_NO.T, x_NI, offs=offsets_E.to(torch.int32))
    sizes = rows_per_expert(offsets_E, len(x_NI))
    return torch.stack([g.T @ x for g, x in zip(grad_NO.split(sizes), x_NI.split(sizes), strict=True)])

"""Split backward passes (zero bubble, arXiv 2401.10241): input gradients now, weight gradients later.

The previous stage waits for the gradient of a stage's input; nothing waits for the gradients of its weights.

Linear layers and experts, which have nearly all of the work, defer the second half. They save its operands, the layer's
input and the gradient of its output. Autograd's own graph is complete after the first half.

Why: `docs/design/decisions/split-backward.md`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import GradientEdge

from phalanx.model.part import modules_declaring
from phalanx.model.products import IDENTITY, Product, ProductLinear, activated_product
from phalanx.model.transformer import Transformer
from phalanx.spec.parts.operations import GroupedLinear

WeightGradient = tuple[GradientEdge, Callable[[], Tensor]]
"""The graph edge of a weight as it was used (perhaps after a cast), and the function that computes its gradient."""


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

    def defer_or_compute(self, weight: GradientEdge | None, gradient: Callable[[], Tensor]) -> Tensor | None:
        """Return the gradient of a weight, or None if it is deferred."""
        if self.deferred is None:
            return gradient()
        assert weight is not None
        self.deferred.append((weight, gradient))
        return None


def compute_weight_grads(deferred: list[WeightGradient]) -> None:
    """Compute the deferred gradients: the second half of a backward pass.

    Gradients reach the parameters and their hooks as in any backward pass, one by one: the operands of each are freed
    before the next is computed."""
    while deferred:
        weight, gradient = deferred.pop(0)
        with torch.no_grad():
            weight_grad = gradient()
        del gradient
        torch.autograd.backward(weight, weight_grad)
        del weight_grad


def split_backward(module: Transformer, deferred_grads: DeferredWeightGrads) -> None:
    """Make the linear layers and experts of a model defer their weight gradients into `deferred_grads`."""
    product = Product(deferred_grads.defer_or_compute)
    if module.logits is F.linear:
        module.logits = lambda x_BTD, weight_VD: activated_product(product, IDENTITY, weight_VD, x_BTD)
    for submodule in module.modules():
        if isinstance(submodule, ProductLinear):
            submodule.product = replace(submodule.product, defer_or_compute=deferred_grads.defer_or_compute)
    for experts in modules_declaring(module, GroupedLinear):
        experts.defer_or_compute = deferred_grads.defer_or_compute

"""Autograd functions of tensor parallelism.

Column- and row-parallel products, all-gather, reduce-scatter and all-reduce."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from phalanx.model.nf4 import dense
from phalanx.model.products import IDENTITY, LinearFunction, Product, ProductLinear, TensorTuple, autocast_operands

if TYPE_CHECKING:
    from phalanx.parallel.tensor.tensor_parallel import TensorParallelGroup


def column_parallel(tp: TensorParallelGroup, x: Tensor, *layers: ProductLinear) -> TensorTuple:
    """Return this rank's columns of the products of `x` with each layer's matrix."""
    operands = autocast_operands(x, *(layer.weight for layer in layers))
    products = ColumnParallelLinear.apply(*operands, tp, tuple(layer.product.linear for layer in layers))
    outputs = (add_bias(z, layer.bias) for z, layer in zip(products, layers, strict=True))
    return tuple(_add_adapter(tp, z, x, layer) for z, layer in zip(outputs, layers, strict=True))


def _add_adapter(tp: TensorParallelGroup, z: Tensor, x: Tensor, layer: ProductLinear) -> Tensor:
    """Return a product of `x` with the output of its adapter, whose B is shared like the layer."""
    if layer.adapter is None:
        return z
    (addend,) = column_parallel(tp, layer.adapter.inner(IDENTITY, x), layer.adapter.b)
    return layer.adapter.add(layer, z, addend)


@dataclass(frozen=True, kw_only=True)
class RowParallelProduct(Product):
    """The sum over ranks of x W^T, with the tokens of the residual stream; x is this rank's columns."""

    tp: TensorParallelGroup

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the reduced product, plus the full bias."""
        return add_bias(self.tp.reduce_tokens(self.linear(x, weight)), bias)

    def receive_gradient(self, gradient: Tensor) -> Tensor:
        """Return the gradient of all tokens."""
        return self.tp.gather_tokens(gradient)

    def sum_over_columns(self, sums: Tensor) -> Tensor:
        """Return sums over the columns of all ranks."""
        return self.tp.all_reduce(sums)


def add_bias(product: Tensor, bias: Tensor | None) -> Tensor:
    """Return the output of a linear layer from its product."""
    return product if bias is None else product + bias.to(product.dtype)


class ColumnParallelLinear(torch.autograd.Function):
    """z_i = x W_i^T.

    The input is saved with the tokens of the residual stream, and gathered again for the weights' gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *arguments: Any) -> TensorTuple:
        """Gather the tokens, and return their product with each weight."""
        *weights, tp, linears = arguments
        has_trained = any(ctx.needs_input_grad[1:-2])
        ctx.save_for_backward(x if has_trained else None, *weights)
        ctx.weight_edges = [get_gradient_edge(weight) if weight.requires_grad else None for weight in weights]
        ctx.tp = tp
        ctx.linears = linears
        gathered = tp.gather_tokens(x)
        return tuple(linear(gathered, dense(weight, x.dtype)) for linear, weight in zip(linears, weights, strict=True))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        """Return the gradients of the input and the weights; the latter may be deferred."""
        x, *weights = ctx.saved_tensors
        x = None if x is None else x.detach()
        tp = ctx.tp
        # A deferred weight gradient gathers its input when it is computed.
        gather_now = tp.deferred_grads.deferred is None and any(ctx.needs_input_grad[1:-2])
        finish_gather = tp.start_gather_tokens(x) if gather_now else partial(tp.gather_tokens, x)
        grad_x = _input_gradient(ctx.linears, gradients, weights)
        finish_reduce = tp.start_reduce_tokens(grad_x)
        get_gathered_x = cache(finish_gather)
        weight_grads = [
            tp.deferred_grads.defer_or_compute(edge, partial(_weight_gradient, gradient, get_gathered_x))
            if needed
            else None
            for gradient, edge, needed in zip(gradients, ctx.weight_edges, ctx.needs_input_grad[1:-2], strict=True)
        ]
        return finish_reduce(), *weight_grads, None, None


def _input_gradient(linears: tuple[LinearFunction, ...], gradients: TensorTuple, weights: list[Tensor]) -> Tensor:
    """Return the gradient of the rows that all products read."""
    dtype = gradients[0].dtype
    grad_x = linears[0](gradients[0], dense(weights[0], dtype).T)
    for linear, gradient, weight in zip(linears[1:], gradients[1:], weights[1:], strict=True):
        weight = dense(weight, dtype)
        if linear is F.linear:
            grad_x.flatten(0, -2).addmm_(gradient.flatten(0, -2), weight)
        else:
            grad_x += linear(gradient, weight.T)
    return grad_x


def _weight_gradient(gradient: Tensor, x: Callable[[], Tensor]) -> Tensor:
    return gradient.flatten(0, -2).T @ x().flatten(0, -2)


class GatherFromSequence(torch.autograd.Function):
    """All-gather of the residual stream's tokens; each rank's gradient is a term of the sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorParallelGroup) -> Tensor:
        """Return all tokens."""
        ctx.tp = tp
        return tp.gather_tokens(x) if tp.sequence else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Reduce the gradients to the tokens of each rank."""
        return ctx.tp.reduce_tokens(gradient if ctx.tp.sequence else gradient.clone()), None


class ReduceToSequence(torch.autograd.Function):
    """Reverse of `GatherFromSequence`: reduce partial sums and scatter tokens."""

    @staticmethod
    def forward(ctx: Any, term: Tensor, tp: TensorParallelGroup) -> Tensor:
        """Reduce the terms to the tokens of each rank."""
        ctx.tp = tp
        return tp.reduce_tokens(term if tp.sequence else term.clone())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Return the gradients of all tokens."""
        return ctx.tp.gather_tokens(gradient), None


class AllReduce(torch.autograd.Function):
    """Sum over ranks, where every rank's loss depends on the sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorParallelGroup) -> Tensor:
        """Return the sum."""
        ctx.tp = tp
        return tp.all_reduce(x.clone())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Return the sum of the gradients."""
        return ctx.tp.all_reduce(gradient.clone()), None


class AllReduceForward(torch.autograd.Function):
    """Sum over ranks, where each rank's gradient is that of its own term."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorParallelGroup) -> Tensor:
        """Return the sum."""
        return tp.all_reduce(x.clone())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Return the gradient unchanged."""
        return gradient, None

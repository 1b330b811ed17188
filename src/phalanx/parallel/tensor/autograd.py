"""Autograd functions of tensor parallelism.

Column- and row-parallel products, all-gather, reduce-scatter, all-reduce, and the cross entropy over a sharded
vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

TensorTuple = tuple[Tensor, ...]


if TYPE_CHECKING:
    from phalanx.parallel.tensor.tensor_parallel import TensorParallelGroup


def column_parallel(x: Tensor, tp: TensorParallelGroup, *layers: nn.Linear) -> TensorTuple:
    """Return this rank's columns of the products of `x` with each layer's matrix."""
    products = ColumnParallelLinear.apply(*autocast_operands(x, *(layer.weight for layer in layers)), tp)
    return tuple(_add_bias(z, layer.bias) for z, layer in zip(products, layers, strict=True))


def row_parallel(hidden: Tensor, tp: TensorParallelGroup, layer: nn.Linear) -> Tensor:
    """Return the sum over ranks of their products, with the tokens of the residual stream.

    Args:
        hidden: This rank's columns of the input, [B, T, columns].
        tp: Ranks that share the layer.
        layer: Layer with these columns of the weight, and with the full bias.
    """
    return _add_bias(RowParallelLinear.apply(*autocast_operands(hidden, layer.weight), tp), layer.bias)


def _add_bias(product: Tensor, bias: Tensor | None) -> Tensor:
    return product if bias is None else product + bias.to(product.dtype)


class ColumnParallelLinear(torch.autograd.Function):
    """z_i = x W_i^T.

    The input is saved with the tokens of the residual stream, and gathered again for the weights' gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights_and_tp: Any) -> TensorTuple:
        """Gather the tokens, and return their product with each weight."""
        *weights, tp = weights_and_tp
        ctx.save_for_backward(x)
        ctx.weights = weights
        ctx.tp = tp
        gathered = tp.gather_tokens(x)
        return tuple(F.linear(gathered, weight) for weight in weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        """Return the gradients of the input and the weights; the latter may be deferred."""
        (x,) = ctx.saved_tensors
        weights = ctx.weights
        tp = ctx.tp
        # A deferred weight gradient gathers its input when it is computed.
        gather_now = tp.deferred_grads.deferred is None and any(ctx.needs_input_grad[1:-1])
        finish_gather = tp.start_gather_tokens(x) if gather_now else partial(tp.gather_tokens, x)
        grad_x = gradients[0] @ weights[0]
        for gradient, weight in zip(gradients[1:], weights[1:], strict=True):
            grad_x.flatten(0, -2).addmm_(gradient.flatten(0, -2), weight)
        finish_reduce = tp.start_reduce_tokens(grad_x)
        get_gathered_x = cache(finish_gather)
        weight_grads = [
            tp.deferred_grads.defer_or_compute(weight, partial(_weight_gradient, gradient, get_gathered_x))
            if needed
            else None
            for gradient, weight, needed in zip(gradients, weights, ctx.needs_input_grad[1:-1], strict=True)
        ]
        return finish_reduce(), *weight_grads, None


class RowParallelLinear(torch.autograd.Function):
    """y = sum over ranks of h W^T."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, tp: TensorParallelGroup) -> Tensor:
        """Return the reduced product."""
        ctx.save_for_backward(hidden)
        ctx.weight = weight
        ctx.tp = tp
        return tp.reduce_tokens(F.linear(hidden, weight))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        """Return the gradients of the input and the weight; the latter may be deferred."""
        (hidden,) = ctx.saved_tensors
        weight = ctx.weight
        tp = ctx.tp
        gradient = tp.gather_tokens(gradient)
        needed = ctx.needs_input_grad[1]
        weight_grad = (
            tp.deferred_grads.defer_or_compute(weight, partial(_weight_gradient, gradient, lambda: hidden))
            if needed
            else None
        )
        return gradient @ weight, weight_grad, None


def _weight_gradient(gradient: Tensor, x: Callable[[], Tensor]) -> Tensor:
    return gradient.flatten(0, -2).T @ x().flatten(0, -2)


def autocast_operands(*tensors: Tensor) -> TensorTuple:
    """Cast the operands of a product as autocast does."""
    device_type = tensors[0].device.type
    if not torch.is_autocast_enabled(device_type):
        return tensors
    return tuple(tensor.to(torch.get_autocast_dtype(device_type)) for tensor in tensors)


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


class VocabParallelCrossEntropy(torch.autograd.Function):
    """log sum_v exp x_v - x_target, by two all-reduces: the maximum, then two sums per token.

    Source: Megatron-LM, section 3."""

    @staticmethod
    def forward(
        ctx: Any, x_NV: Tensor, target_N: Tensor, ignored: int, first_row: int, tp: TensorParallelGroup
    ) -> Tensor:
        """Return the loss summed over the targets that are not `ignored`."""
        column = target_N - first_row
        is_local = (column >= 0) & (column < x_NV.shape[1])
        column = column.masked_fill(~is_local, 0)[:, None]
        row_max = tp.all_reduce(x_NV.amax(1), dist.ReduceOp.MAX)
        exp_NV = (x_NV - row_max[:, None]).exp_()
        target_logit = (x_NV.gather(1, column)[:, 0] - row_max).masked_fill(~is_local, 0)
        total, target_logit = tp.all_reduce(torch.stack([exp_NV.sum(1), target_logit])).unbind()
        is_counted = target_N != ignored
        ctx.save_for_backward(exp_NV.div_(total[:, None]), column, is_local, is_counted)
        return ((total.log() - target_logit) * is_counted).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        """Return the gradient of this rank's logits."""
        probs_NV, column, is_local, is_counted = ctx.saved_tensors
        grad_x = probs_NV.scatter_add(1, column, -is_local.to(probs_NV.dtype)[:, None])
        return grad_x.mul_((is_counted * gradient)[:, None]), None, None, None, None

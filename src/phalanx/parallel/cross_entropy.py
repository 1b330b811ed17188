"""Cross entropy whose gradient replaces the logits, in chunks of rows.

Logits are the largest tensor of a step. Nothing of their size is allocated here: the forward pass already computes the
gradient, softmax(x) - onehot(target), into the memory of the logits. Values in fp32 exist for one chunk at a time.

With tensor parallelism each rank has some columns of the logits (Megatron-LM, arXiv 1909.08053, section 3). Two
all-reduces follow: the maximum of the log-sum-exps of each row, then their sum and its target's logit.

Why: `docs/design/decisions/loss-in-place.md`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.model.dtypes import at_least_fp32
from phalanx.parallel.protocols import TensorParallelProtocol
from phalanx.spec.chunks import loss_chunk_rows


def log_sum_exp(x_NV: Tensor) -> Tensor:
    """Return log sum_v exp(x_v) of each row, [N], at least in fp32."""
    max_N = at_least_fp32(x_NV.amax(1))
    return max_N + torch.sub(x_NV, max_N[:, None]).exp_().sum(1).log_()


def replace_by_gradient(x_NV: Tensor, logsumexp_N: Tensor, column_N: Tensor, scale: float) -> Tensor:
    """Replace logits by the gradient of their cross entropy, and return them.

    Args:
        x_NV: Logits, or some of their columns.
        logsumexp_N: Log-sum-exp of the full rows.
        column_N: Column of each target; -1 if it is not among those of `x_NV`, or not counted.
        scale: Factor of the loss.
    """
    gradient_NV = torch.sub(x_NV, logsumexp_N[:, None]).exp_()
    gradient_NV.scatter_add_(1, column_N.clamp(min=0)[:, None], -(column_N >= 0).to(gradient_NV.dtype)[:, None])
    return x_NV.copy_(gradient_NV if scale == 1 else gradient_NV.mul_(scale))


def log_sum_exp_to_compile(x_NV: Tensor) -> Tensor:
    """Return `log_sum_exp`, written such that torch.compile reads the logits once."""
    x_NV = at_least_fp32(x_NV)
    max_N1 = x_NV.amax(1, keepdim=True)
    return (max_N1 + (x_NV - max_N1).exp().sum(1, keepdim=True).log())[:, 0]


def replace_to_compile(x_NV: Tensor, logsumexp_N: Tensor, column_N: Tensor, scale: float) -> Tensor:
    """Do what `replace_by_gradient` does, in one pass over the logits if compiled.

    Args:
        x_NV: Logits, or some of their columns.
        logsumexp_N: Log-sum-exp of the full rows.
        column_N: Column of each target, or -1.
        scale: Factor of the loss.
    """
    is_target_NV = torch.arange(x_NV.shape[1], device=x_NV.device) == column_N[:, None]
    probs_NV = (at_least_fp32(x_NV) - logsumexp_N[:, None]).exp()
    return x_NV.copy_((probs_NV - is_target_NV.to(probs_NV.dtype)) * scale)


KNOWN_VALUE = "known_value"
"""Attribute of a tensor with its value, which the host then need not read from the device."""


def log_sum_exp_in_chunks(x_NV: Tensor) -> Tensor:
    """Return `log_sum_exp` of chunks of rows, because it allocates values of the size of its rows."""
    return torch.cat([log_sum_exp(x) for x in x_NV.split(_chunk_rows(x_NV))])


def replace_in_chunks(x_NV: Tensor, logsumexp_N: Tensor, column_N: Tensor, scale: float) -> Tensor:
    """Replace logits by their gradient in chunks of rows, and return them.

    Args:
        x_NV: Logits, or some of their columns.
        logsumexp_N: As in `replace_by_gradient`.
        column_N: As in `replace_by_gradient`.
        scale: Factor of the loss.
    """
    rows = _chunk_rows(x_NV)
    for chunk in zip(x_NV.split(rows), logsumexp_N.split(rows), column_N.split(rows), strict=True):
        replace_by_gradient(*chunk, scale=scale)
    return x_NV


def _chunk_rows(x_NV: Tensor) -> int:
    return loss_chunk_rows(x_NV.shape[1], on_cuda=x_NV.is_cuda)


class Kernels(NamedTuple):
    """Functions of rows of logits."""

    log_sum_exp: Callable[[Tensor], Tensor] = log_sum_exp_in_chunks
    replace_by_gradient: Callable[..., Tensor] = replace_in_chunks


EAGER = Kernels()


@cache
def compiled_kernels() -> Kernels:
    """Return the functions compiled: each is one kernel on a GPU.

    Where a profiler disables the compiler, they are those of `EAGER`."""

    def compute_log_sum_exp(x_NV: Tensor) -> Tensor:
        return log_sum_exp_to_compile(x_NV) if torch.compiler.is_compiling() else EAGER.log_sum_exp(x_NV)

    def replace(x_NV: Tensor, logsumexp_N: Tensor, column_N: Tensor, scale: float) -> Tensor:
        function = replace_to_compile if torch.compiler.is_compiling() else EAGER.replace_by_gradient
        return function(x_NV, logsumexp_N, column_N, scale=scale)

    return Kernels(torch.compile(compute_log_sum_exp), torch.compile(replace))


def run_scaled_backward(loss: Tensor, scale: float) -> None:
    """Run the backward pass of a loss multiplied by `scale`.

    The gradient tensor of the loss carries its value for the host, which cannot read a GPU without waiting.
    """
    gradient = torch.full_like(loss, scale)
    setattr(gradient, KNOWN_VALUE, scale)
    loss.backward(gradient)


def in_place_cross_entropy(
    logits_BTV: Tensor,
    targets_BT: Tensor,
    ignored: int,
    tp: TensorParallelProtocol | None = None,
    kernels: Kernels = EAGER,
    scale: float = 1.0,
) -> Tensor:
    """Return the negative log-likelihood of the targets in nats, summed, at least in fp32.

    If they need a gradient, the logits are overwritten.

    Args:
        logits_BTV: Logits, or this rank's columns of them.
        targets_BT: Target token ids.
        ignored: Token id of targets that are not counted.
        tp: The ranks with the other columns.
        kernels: Functions of rows of logits.
        scale: Expected factor of the loss in `run_scaled_backward`; others cost a pass over the logits.
    """
    logits_NV = logits_BTV.flatten(0, 1)
    return cast(Tensor, _InPlaceCrossEntropy.apply(logits_NV, targets_BT.flatten(), ignored, tp, kernels, scale))


class _InPlaceCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_NV: Tensor,
        target_N: Tensor,
        ignored: int,
        tp: TensorParallelProtocol | None,
        kernels: Kernels,
        scale: float,
    ) -> Tensor:
        needs_gradient = ctx.needs_input_grad[0]
        loss = sum_losses(
            logits_NV.detach(), target_N, ignored, tp=tp, kernels=kernels, scale=scale if needs_gradient else None
        )
        if needs_gradient:
            ctx.save_for_backward(logits_NV.detach())  # it becomes a gradient, which must not hold the graph
            ctx.scale = scale
        return loss

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return *scale_saved_gradients(ctx, gradient), None, None, None, None, None


def sum_losses(
    x_NV: Tensor,
    target_N: Tensor,
    ignored: int,
    *,
    tp: TensorParallelProtocol | None,
    kernels: Kernels,
    scale: float | None,
) -> Tensor:
    """Return the loss of rows of logits, and replace them by their gradient.

    Args:
        x_NV: Logits, or this rank's columns of them.
        target_N: Target token ids.
        ignored: Token id of targets that are not counted.
        tp: The ranks with the other columns.
        kernels: Functions of rows of logits.
        scale: Factor of the loss in its gradient; None if no gradient is needed.
    """
    logsumexp_N = kernels.log_sum_exp(x_NV)
    column_N = target_N - (0 if tp is None else tp.first_row)
    is_remote_N = (column_N < 0) | (column_N >= x_NV.shape[1])
    target_logit_N = x_NV.gather(1, column_N.masked_fill(is_remote_N, 0)[:, None])[:, 0].to(logsumexp_N.dtype)
    if tp is not None:
        logsumexp_N, target_logit_N = _sum_over_ranks(tp, logsumexp_N, target_logit_N.masked_fill_(is_remote_N, 0))
    is_ignored_N = target_N == ignored
    loss_N = (logsumexp_N - target_logit_N).masked_fill_(is_ignored_N, 0)
    if scale is not None:
        # exp(x - infinity) is 0: rows that are not counted have no gradient.
        logsumexp_N = logsumexp_N.masked_fill(is_ignored_N, torch.inf)
        column_N = column_N.masked_fill_(is_remote_N | is_ignored_N, -1)
        kernels.replace_by_gradient(x_NV, logsumexp_N, column_N, scale=scale)
    return loss_N.sum()


def scale_saved_gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
    """Return the saved gradients of a loss that was scaled by `ctx.scale`, multiplied by `gradient` instead."""
    saved: tuple[Tensor, ...] = ctx.saved_tensors
    if getattr(gradient, KNOWN_VALUE, None) != ctx.scale:
        for tensor in saved:
            tensor.mul_(gradient / ctx.scale)
    return saved


def _sum_over_ranks(tp: TensorParallelProtocol, logsumexp_N: Tensor, target_logit_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-sum-exp of full rows from that of this rank's columns, and the targets' logits."""
    max_N = logsumexp_N.clone()
    tp.all_reduce(max_N, dist.ReduceOp.MAX)
    terms = torch.stack([(logsumexp_N - max_N).exp_(), target_logit_N])
    total_N, target_logit_N = tp.all_reduce(terms, dist.ReduceOp.SUM).unbind()
    return total_N.log() + max_N, target_logit_N

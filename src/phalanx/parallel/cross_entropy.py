"""Cross entropy whose gradient replaces the logits, in chunks of rows.

Logits are the largest tensor of a step. Nothing of their size is allocated here: the forward pass already computes the
gradient, softmax(x) - onehot(target), into the memory of the logits. Values in fp32 exist for one chunk at a time.

With tensor parallelism each rank has some columns of the logits (Megatron-LM, arXiv 1909.08053, section 3). Two
all-reduces follow: the maximum of each row, then its sum of exponentials and its target's logit.

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


def sum_exponentials(x_NV: Tensor, max_N: Tensor) -> Tensor:
    """Return sum_v exp(x_v - max) of each row, [N], in the dtype of the maxima."""
    return torch.sub(x_NV, max_N[:, None]).exp_().sum(1)


def replace_by_gradient(x_NV: Tensor, logsumexp_N: Tensor, column_N1: Tensor, has_target_N: Tensor) -> Tensor:
    """Replace logits by the gradient of their cross entropy, and return them.

    Args:
        x_NV: Logits, or some of their columns.
        logsumexp_N: Log-sum-exp of the full rows.
        column_N1: Column of each target among those of `x_NV`.
        has_target_N: True if the target is among them, and counted.
    """
    probs_NV = torch.sub(x_NV, logsumexp_N[:, None]).exp_()
    return x_NV.copy_(probs_NV.scatter_add_(1, column_N1, -has_target_N.to(probs_NV.dtype)[:, None]))


class Kernels(NamedTuple):
    """Functions of one chunk of rows."""

    sum_exponentials: Callable[[Tensor, Tensor], Tensor] = sum_exponentials
    replace_by_gradient: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] = replace_by_gradient


EAGER = Kernels()


@cache
def compiled_kernels() -> Kernels:
    """Return the functions compiled: each is one kernel on a GPU."""
    return Kernels(torch.compile(sum_exponentials), torch.compile(replace_by_gradient))


def in_place_cross_entropy(
    logits_BTV: Tensor,
    targets_BT: Tensor,
    ignored: int,
    tp: TensorParallelProtocol | None = None,
    kernels: Kernels = EAGER,
) -> Tensor:
    """Return the negative log-likelihood of the targets in nats, summed, at least in fp32.

    If they need a gradient, the logits are overwritten.

    Args:
        logits_BTV: Logits, or this rank's columns of them.
        targets_BT: Target token ids.
        ignored: Token id of targets that are not counted.
        tp: The ranks with the other columns.
        kernels: Functions of one chunk.
    """
    logits_NV = logits_BTV.flatten(0, 1)
    return cast(Tensor, _InPlaceCrossEntropy.apply(logits_NV, targets_BT.flatten(), ignored, tp, kernels))


class _InPlaceCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_NV: Tensor,
        target_N: Tensor,
        ignored: int,
        tp: TensorParallelProtocol | None,
        kernels: Kernels,
    ) -> Tensor:
        x_NV = logits_NV.detach()
        rows = loss_chunk_rows(x_NV.shape[1], on_cuda=x_NV.is_cuda)
        max_N = at_least_fp32(x_NV.amax(1))
        if tp is not None:
            tp.all_reduce(max_N, dist.ReduceOp.MAX)
        total_N = torch.cat(list(map(kernels.sum_exponentials, x_NV.split(rows), max_N.split(rows))))
        column_N = target_N - (0 if tp is None else tp.first_row)
        is_remote_N = (column_N < 0) | (column_N >= x_NV.shape[1])
        column_N1 = column_N.masked_fill_(is_remote_N, 0)[:, None]
        target_logit_N = (x_NV.gather(1, column_N1)[:, 0] - max_N).masked_fill_(is_remote_N, 0)
        if tp is not None:
            total_N, target_logit_N = tp.all_reduce(torch.stack([total_N, target_logit_N]), dist.ReduceOp.SUM).unbind()
        loss_N = (total_N.log() - target_logit_N).masked_fill_(target_N == ignored, 0)
        if ctx.needs_input_grad[0]:
            # exp(x - infinity) is 0: rows that are not counted have no gradient.
            logsumexp_N = (max_N + total_N.log()).masked_fill_(target_N == ignored, torch.inf)
            has_target_N = ~(is_remote_N | (target_N == ignored))
            for chunk in zip(*(t.split(rows) for t in (x_NV, logsumexp_N, column_N1, has_target_N)), strict=True):
                kernels.replace_by_gradient(*chunk)
            ctx.save_for_backward(logits_NV)
        return loss_N.sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        (grad_logits_NV,) = ctx.saved_tensors
        return grad_logits_NV.mul_(gradient), None, None, None, None

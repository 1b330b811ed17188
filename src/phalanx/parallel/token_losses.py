"""The loss of each token, for losses that are functions of sums over some tokens, such as those of preferences.

The gradient of such a loss has a factor for each token, which is known only after all sums, so that the forward pass
cannot replace logits by their gradient as `parallel.cross_entropy` does. If all logits of a micro-batch fit, they are
kept for the backward pass, which replaces them. Otherwise each chunk's logits are computed again there, as in Cut
Cross-Entropy (arXiv 2411.09009): one more product with the matrix of the head."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.model.products import autocast_operands
from phalanx.model.transformer import HeadFunction
from phalanx.parallel.cross_entropy import EAGER, Kernels, losses_of_rows
from phalanx.parallel.data.zero_parameters import needs_fp32_sum
from phalanx.parallel.linear_cross_entropy import ChunkedLoss, HeadGradients
from phalanx.parallel.protocols import TensorParallelProtocol


def token_losses(
    logits_BTV: Tensor,
    targets_BT: Tensor,
    ignored: int,
    tp: TensorParallelProtocol | None = None,
    kernels: Kernels = EAGER,
    softcap: float | None = None,
) -> Tensor:
    """Return the negative log-likelihood of each target in nats, [B, T], at least in fp32, and 0 for ignored targets.

    The logits, perhaps only this rank's columns, are overwritten as by `in_place_cross_entropy`."""
    options = targets_BT.flatten(), ignored, tp, kernels, softcap
    return cast(Tensor, _TokenLosses.apply(logits_BTV.flatten(0, 1), *options)).view_as(targets_BT)


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_NV: Tensor,
        target_N: Tensor,
        ignored: int,
        tp: TensorParallelProtocol | None,
        kernels: Kernels,
        softcap: float | None,
    ) -> Tensor:
        x_NV = logits_NV.detach()
        loss_N, logsumexp_N, column_N = losses_of_rows(x_NV, target_N, ignored, tp, kernels, softcap=softcap)
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(x_NV, logsumexp_N, column_N)
            ctx.kernels = kernels
            ctx.softcap = softcap
        return loss_N

    @staticmethod
    def backward(ctx: Any, gradient_N: Tensor) -> tuple[Tensor | None, ...]:
        x_NV, logsumexp_N, column_N = ctx.saved_tensors
        x_NV = ctx.kernels.replace_by_gradient(x_NV, logsumexp_N, column_N, 1.0, ctx.softcap)
        return x_NV.mul_(gradient_N[:, None]), *[None] * 5


def token_losses_of_head(loss: ChunkedLoss, targets_BT: Tensor, ignored: int) -> HeadFunction | None:
    """Return the function of the head's input and matrix that computes `token_losses`; None if all logits fit."""
    chunks = loss.chunks(targets_BT)
    return None if chunks is None else cast(HeadFunction, partial(_TokenLossesOfHead.apply, loss, chunks, ignored))


class _TokenLossesOfHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, loss: ChunkedLoss, targets: Sequence[Tensor], ignored: int, x_BTD: Tensor, weight_VD: Tensor
    ) -> Tensor:
        x, weight = autocast_operands(x_BTD, weight_VD)
        torch.clear_autocast_cache()  # casts of weights that recomputed blocks do not save
        if loss.tp is not None:
            x = loss.tp.gather_tokens(x)
        kept = []
        with torch.autocast(x.device.type, enabled=False):
            for part, target in zip(x.flatten(0, 1).split([len(t) for t in targets]), targets, strict=True):
                logits = F.linear(part, weight)
                kept.append(losses_of_rows(logits, target, ignored, loss.tp, loss.kernels, softcap=loss.softcap))
                # Free these logits before those of the next chunk are computed.
                del logits
        losses, *saved = (torch.cat(tensors) for tensors in zip(*kept, strict=True))
        if any(ctx.needs_input_grad):
            # The tokens of all ranks are gathered again.
            ctx.save_for_backward(x_BTD, weight_VD, *saved)
            ctx.operand_dtype = x.dtype
            ctx.loss = loss
            ctx.sizes = [len(target) for target in targets]
        return losses.view(x.shape[:2])

    @staticmethod
    def backward(ctx: Any, gradient_BT: Tensor) -> tuple[Tensor | None, ...]:
        loss: ChunkedLoss = ctx.loss
        x_BTD, weight_VD, *saved = ctx.saved_tensors
        x, weight = (tensor.to(ctx.operand_dtype) for tensor in (x_BTD, weight_VD))
        if loss.tp is not None:
            x = loss.tp.gather_tokens(x)
        sum_dtype = torch.float32 if needs_fp32_sum(weight_VD.dtype, len(ctx.sizes)) else weight_VD.dtype
        is_trained = ctx.needs_input_grad[-1]
        grad_weight = torch.zeros_like(weight_VD, dtype=sum_dtype) if is_trained else None
        sums = HeadGradients(torch.empty_like(x).flatten(0, 1), grad_weight)
        start = 0
        parts = (tensor.split(ctx.sizes) for tensor in (x.flatten(0, 1), *saved, gradient_BT.flatten()))
        with torch.autocast(x.device.type, enabled=False):
            for part, logsumexp, column, gradient in zip(*parts, strict=True):
                rows = slice(start, start + len(part))
                start = rows.stop
                logits = F.linear(part, weight)
                if loss.softcap is not None:
                    loss.kernels.replace_by_capped(logits, loss.softcap)
                logits = loss.kernels.replace_by_gradient(logits, logsumexp, column, 1.0, loss.softcap)
                sums.add_chunk(rows, logits.mul_(gradient[:, None]), part, weight)
                del logits
        grad_x = sums.x.view_as(x)
        if loss.tp is not None:
            grad_x = loss.tp.reduce_tokens(grad_x)
        own = None if sums.weight is None else sums.weight.to(weight_VD.dtype)
        return None, None, None, grad_x.to(x_BTD.dtype), own

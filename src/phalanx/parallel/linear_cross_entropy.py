"""Head and cross entropy in chunks of tokens, so that a micro-batch never has all its logits in memory.

A chunk's logits are computed and replaced by their gradient G (`parallel.cross_entropy`). With input x and matrix W of
the head, G W is the gradient of the chunk's input, and the gradient of W is the sum of G^T x over the chunks. The
forward pass does all of it, because the factor of the loss is known: no product is computed twice. Sources: Liger
(arXiv 2410.10989, section 3.2), and Cut Cross-Entropy (arXiv 2411.09009), which computes the logits twice instead.

The gradients wait for the backward pass. If that is split, the gradient of W is part of its first half.

Why: `docs/design/decisions/loss-in-place.md`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.model.dtypes import at_least_fp32
from phalanx.model.products import autocast_operands
from phalanx.model.transformer import HeadFunction
from phalanx.parallel.cross_entropy import EAGER, UNSCALED, Kernels, LossScale, LossTerms, sum_losses
from phalanx.parallel.data.zero_parameters import needs_fp32_sum
from phalanx.parallel.distillation_loss import TeacherHead, sum_distillation_losses
from phalanx.parallel.protocols import TensorParallelProtocol
from phalanx.spec.chunks import logits_chunk_rows, loss_chunk_rows


@dataclass(frozen=True, kw_only=True)
class ChunkedLoss:
    """The loss of a model's head in chunks."""

    columns: int
    """Maximum number of columns of the logits on any rank, so that ranks that share the logits form equal chunks."""
    itemsize: int
    """Bytes of a logit."""
    tp: TensorParallelProtocol | None = None
    """The ranks with the other columns."""
    kernels: Kernels = EAGER
    """Kernels that compute the loss and the gradient of rows of logits."""
    scale: LossScale = UNSCALED
    """Factor of the loss. A backward pass other than its `run_backward` costs a pass over the gradients."""
    softcap: float | None = None
    """Cap of the logits."""

    def __call__(
        self, targets_BT: Tensor, ignored: int, terms: LossTerms | None = None, teacher: TeacherHead | None = None
    ) -> HeadFunction | None:
        """Return the function of the head's input and matrix that computes the loss; None if a chunk has all logits.

        The loss is the negative log-likelihood of the targets in nats, summed, at least in fp32. Targets equal to
        `ignored` are not counted. With a teacher it is that of distillation, by a function also for a single chunk."""
        chunks = self.chunks(targets_BT)
        if chunks is None and teacher is not None:
            chunks = [targets_BT.flatten()]
        if chunks is None:
            return None
        # Inside `forward` gradients are never enabled, and a trained matrix requires them in an evaluation too.
        options = self, chunks, ignored, terms, teacher, torch.is_grad_enabled()
        return cast(HeadFunction, partial(_LinearCrossEntropy.apply, *options))

    def chunks(self, targets_BT: Tensor) -> Sequence[Tensor] | None:
        """Return the targets of each chunk; None if there is one."""
        rows = logits_chunk_rows(targets_BT.numel(), self.columns, self.itemsize)
        return None if rows >= targets_BT.numel() else targets_BT.flatten().split(rows)


@dataclass(frozen=True)
class HeadGradients:
    """Gradients of the head's input and matrix."""

    x: Tensor
    weight: Tensor | None
    """None: the matrix is frozen."""

    def add_chunk(self, rows: slice, logits_gradient: Tensor, x: Tensor, weight_VD: Tensor) -> None:
        """Compute the gradient of a chunk's input, the given rows, and add that of the matrix."""
        torch.mm(logits_gradient, weight_VD, out=self.x[rows])
        if self.weight is None:
            return
        if self.weight.dtype == x.dtype:
            self.weight.addmm_(logits_gradient.T, x)
            return
        # The gradient is computed in pieces: each is held in the dtype of the product before it is added.
        piece = loss_chunk_rows(x.shape[1], on_cuda=x.is_cuda)
        for total, columns in zip(self.weight.split(piece), logits_gradient.split(piece, dim=1), strict=True):
            total += columns.T @ x


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        loss: ChunkedLoss,
        targets: Sequence[Tensor],
        ignored: int,
        terms: LossTerms | None,
        teacher: TeacherHead | None,
        needs_gradients: bool,
        x_BTD: Tensor,
        weight_VD: Tensor,
    ) -> Tensor:
        x, weight = autocast_operands(x_BTD, weight_VD)
        torch.clear_autocast_cache()  # casts of weights that recomputed blocks do not save
        if loss.tp is not None:
            x = loss.tp.gather_tokens(x)
        gradients = None
        if needs_gradients and any(ctx.needs_input_grad):
            sum_dtype = torch.float32 if needs_fp32_sum(weight_VD.dtype, len(targets)) else weight_VD.dtype
            is_trained = ctx.needs_input_grad[-1]
            grad_weight = torch.zeros_like(weight_VD, dtype=sum_dtype) if is_trained else None
            gradients = HeadGradients(torch.empty_like(x).flatten(0, 1), grad_weight)
        with torch.autocast(x.device.type, enabled=False):
            total = _sum_chunks(loss, x.flatten(0, 1), weight, targets, ignored, terms, teacher, gradients)
        if gradients is not None:
            grad_x = gradients.x.view_as(x)
            if loss.tp is not None:
                grad_x = loss.tp.reduce_tokens(grad_x)
            grad_weight = gradients.weight
            saved = (grad_x,) if grad_weight is None else (grad_x, grad_weight.to(weight_VD.dtype))
            ctx.save_for_backward(*saved)
            ctx.scale = loss.scale
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, *grad_weight = ctx.scale.scale_saved_gradients(ctx.saved_tensors, gradient)
        return *[None] * 6, grad_x, *(grad_weight or [None])


def _sum_chunks(
    loss: ChunkedLoss,
    x_ND: Tensor,
    weight_VD: Tensor,
    targets: Sequence[Tensor],
    ignored: int,
    terms: LossTerms | None,
    teacher: TeacherHead | None,
    gradients: HeadGradients | None,
) -> Tensor:
    """Return the loss of all chunks of targets, and compute the gradients, if any are needed."""
    scale = None if gradients is None else loss.scale
    total = at_least_fp32(x_ND.new_zeros(()))
    taught_ND = None if teacher is None else teacher.gathered(loss.tp)
    start = 0
    for target in targets:
        rows = slice(start, start + len(target))
        start = rows.stop
        logits = F.linear(x_ND[rows], weight_VD)
        of_chunk = None if terms is None else terms.rows(rows)
        if teacher is None or taught_ND is None:
            total += sum_losses(logits, target, ignored, loss.tp, loss.kernels, scale, loss.softcap, of_chunk)
        else:
            taught = teacher.logits(taught_ND[rows])
            total += sum_distillation_losses(
                logits, taught, target, ignored, teacher, loss.tp, scale, loss.softcap, of_chunk
            )
            del taught
        if gradients is not None:
            gradients.add_chunk(rows, logits, x_ND[rows], weight_VD)
        # Free these logits before those of the next chunk are computed.
        del logits
    return total

"""Distillation: cross entropy and the divergence from a teacher's probabilities, whose gradient replaces the logits.

With logits x of the student and y of the teacher, temperature T, weight w, p = softmax(y / T) and q = softmax(x / T),
the loss of a row is (1 - w) (log sum exp x - x_target) + w T^2 sum_v p_v (log p_v - log q_v), and its gradient is
(1 - w) (softmax(x) - onehot) + w T (q - p). The factor T^2 keeps the size of gradients (arXiv 1503.02531, section 2).

Of each row five sums over the vocabulary are needed, shifted by the maxima of x and y, so that ranks with columns of
the logits exchange these numbers only, in two all-reduces as for cross entropy. Values in fp32, and those of the
teacher, exist for one chunk of rows at a time.

Why: `docs/design/decisions/online-teacher.md`."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from phalanx.model.chunks import row_chunks
from phalanx.parallel.cross_entropy import LossScale, LossTerms, replace_by_capped
from phalanx.parallel.protocols import TensorParallelProtocol
from phalanx.spec.chunks import loss_chunk_rows


@dataclass(frozen=True, kw_only=True)
class TeacherHead:
    """The teacher's last layer in a micro-batch, and what of it is learned."""

    x: Tensor
    """Input of its head, [B, T, D]; with sequence parallelism, of this rank's tokens."""
    weight: Tensor
    """This rank's rows of its matrix, [V, D]."""
    softcap: float | None
    temperature: float
    share: float
    """Weight w of the divergence."""
    divergences: list[Tensor] = field(default_factory=list)
    """Sums of KL(teacher || student) over this rank's targets, one for each part of the micro-batch."""

    def gathered(self, tp: TensorParallelProtocol | None) -> Tensor:
        """Return the input of the head of all tokens, [N, D]."""
        x = self.x.to(self.weight.dtype)
        return (x if tp is None else tp.gather_tokens(x)).flatten(0, 1)

    def logits(self, x_ND: Tensor) -> Tensor:
        """Return the teacher's logits, or this rank's columns."""
        logits = F.linear(x_ND, self.weight)
        return logits if self.softcap is None else replace_by_capped(logits, self.softcap)


def sum_distillation_losses(
    x_NV: Tensor,
    y_NV: Tensor,
    target_N: Tensor,
    ignored: int,
    teacher: TeacherHead,
    tp: TensorParallelProtocol | None,
    scale: LossScale | None,
    softcap: float | None,
    terms: LossTerms | None = None,
) -> Tensor:
    """Return the loss of rows of logits x, given the teacher's y, and add to `teacher.divergences`.

    Rows whose target is `ignored` are not counted. The logits x are replaced by their gradient, unless `scale` is
    None."""
    if softcap is not None:
        replace_by_capped(x_NV, softcap)
    temperature = teacher.temperature
    share = teacher.share
    column_N = target_N - (0 if tp is None else tp.first_row)
    column_N = column_N.masked_fill((column_N < 0) | (column_N >= x_NV.shape[1]), -1)
    rows = loss_chunk_rows(x_NV.shape[1], on_cuda=x_NV.is_cuda)
    dtype = torch.promote_types(x_NV.dtype, torch.float32)
    maxima_2N = torch.stack([x_NV.amax(1), y_NV.amax(1)]).to(dtype)
    if tp is not None:
        tp.all_reduce(maxima_2N, dist.ReduceOp.MAX)
    max_x_N, max_y_N = maxima_2N
    sums_5N = x_NV.new_empty(5, len(x_NV), dtype=dtype)
    for x, y, max_x, max_y, column, sums in row_chunks(rows, x_NV, y_NV, max_x_N, max_y_N, column_N, sums_5N.T):
        shifted = torch.sub(x, max_x[:, None])
        sums[:, 0] = shifted.exp().sum(1)
        sums[:, 1] = (shifted / temperature).exp_().sum(1)
        sums[:, 3] = shifted.gather(1, column.clamp(min=0)[:, None])[:, 0].masked_fill_(column < 0, 0)
        difference = torch.sub(y, max_y[:, None])
        weights = (difference / temperature).exp_()
        sums[:, 2] = weights.sum(1)
        sums[:, 4] = weights.mul_(difference.sub_(shifted)).sum(1)
        # Free them before those of the next chunk are computed.
        del shifted, difference, weights
    if tp is not None:
        tp.all_reduce(sums_5N, dist.ReduceOp.SUM)
    # All relative to the maxima, which cancel.
    logs_3N = sums_5N[:3].log()
    divergence_N = sums_5N[4] / sums_5N[2] / temperature - logs_3N[2] + logs_3N[1]
    loss_N = (1 - share) * (logs_3N[0] - sums_5N[3]) + share * temperature**2 * divergence_N
    is_ignored_N = target_N == ignored
    if scale is not None:
        # exp(x - infinity) is 0: rows that are not counted have no gradient.
        logs_3N = logs_3N.masked_fill(is_ignored_N, torch.inf)
        column_N = column_N.masked_fill(is_ignored_N, -1)
        _replace_by_gradient(x_NV, y_NV, maxima_2N, logs_3N, column_N, rows, teacher, scale.factor, softcap)
    divergence_N = divergence_N.masked_fill_(is_ignored_N, 0)
    loss_N = loss_N.masked_fill_(is_ignored_N, 0)
    if terms is not None:
        loss_N = terms.weigh(loss_N)
        divergence_N = terms._replace(sums=None).weigh(divergence_N)
        if scale is not None:
            terms.weigh_gradient(x_NV)
    teacher.divergences.append(divergence_N.sum())
    return loss_N.sum()


def _replace_by_gradient(
    x_NV: Tensor,
    y_NV: Tensor,
    maxima_2N: Tensor,
    logs_3N: Tensor,
    column_N: Tensor,
    rows: int,
    teacher: TeacherHead,
    factor: float,
    softcap: float | None,
) -> None:
    """Replace the student's logits by the gradient of `factor` times the loss.

    `logs_3N` are the logarithms of the sums of exp(x), exp(x / T) and exp(y / T), relative to the maxima of x and y."""
    temperature = teacher.temperature
    share = teacher.share
    for x, y, max_x, max_y, log, log_of_student, log_of_teacher, column in row_chunks(
        rows, x_NV, y_NV, *maxima_2N, *logs_3N, column_N
    ):
        shifted = torch.sub(x, max_x[:, None])
        gradient = torch.sub(shifted, log[:, None]).exp_()
        gradient.scatter_add_(1, column.clamp(min=0)[:, None], -(column >= 0).to(gradient.dtype)[:, None])
        gradient.mul_(1 - share)
        shifted.div_(temperature).sub_(log_of_student[:, None]).exp_()
        taught = torch.sub(y, max_y[:, None]).div_(temperature).sub_(log_of_teacher[:, None]).exp_()
        gradient.add_(shifted.sub_(taught), alpha=share * temperature)
        if softcap is not None:  # whose slope is 1 - (x / c)^2
            gradient.addcmul_(gradient, x.square(), value=-(softcap**-2))
        x.copy_(gradient.mul_(factor))
        # Free them before those of the next chunk are computed.
        del shifted, gradient, taught

"""Cross entropy whose gradient replaces the logits, in chunks of rows.

Logits are the largest tensor of a step. Nothing of their size is allocated here: the forward pass already computes the
gradient, softmax(x) - onehot(target), into the memory of the logits. Values in fp32 exist for one chunk at a time.

Two kernels do this work: `log_sum_exp` of each row, and `replace_by_gradient`. Each has a variant for the compiler. A
third, `replace_by_capped`, comes before them if the model caps its logits.

With tensor parallelism each rank has some columns of the logits (Megatron-LM, arXiv 1909.08053, section 3). Two
all-reduces follow: the maximum of the log-sum-exps of each row, then their sum and its target's logit.

Why: `docs/design/decisions/loss-in-place.md`."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.model.chunks import row_chunks
from phalanx.model.dtypes import at_least_fp32
from phalanx.parallel.protocols import TensorParallelProtocol
from phalanx.spec.chunks import loss_chunk_rows


def replace_by_capped(x_NV: Tensor, softcap: float) -> Tensor:
    """Replace logits z by c tanh(z / c), and return them (Gemma 2, arXiv 2408.00118, section 2)."""
    return x_NV.div_(softcap).tanh_().mul_(softcap)


def log_sum_exp(x_NV: Tensor) -> Tensor:
    """Return log sum_v exp(x_v) of each row, [N], at least in fp32: in chunks of rows, or in one pass if compiled."""
    if torch.compiler.is_compiling():
        return log_sum_exp_in_one_pass(x_NV)
    logsumexp_N = x_NV.new_empty(len(x_NV), dtype=torch.promote_types(x_NV.dtype, torch.float32))
    for x, logsumexp in row_chunks(_rows_per_chunk(x_NV), x_NV, logsumexp_N):
        maximum = at_least_fp32(x.amax(1))
        torch.add(maximum, torch.sub(x, maximum[:, None]).exp_().sum(1).log_(), out=logsumexp)
    return logsumexp_N


def log_sum_exp_in_one_pass(x_NV: Tensor) -> Tensor:
    """Compiled variant of `log_sum_exp`: the logits are read once."""
    x_NV = at_least_fp32(x_NV)
    max_N1 = x_NV.amax(1, keepdim=True)
    return (max_N1 + (x_NV - max_N1).exp().sum(1, keepdim=True).log())[:, 0]


def replace_by_gradient(
    x_NV: Tensor, logsumexp_N: Tensor, column_N: Tensor, scale: float, softcap: float | None = None
) -> Tensor:
    """Replace logits by the gradient of `scale` times their cross entropy, and return them.

    Capped logits x are replaced by the gradient of those before the cap c, whose slope is 1 - (x / c)^2.

    The logits may be only this rank's columns; the log-sum-exp is always over all columns. `column_N` holds the column
    of each target, or -1 if the target is in another rank's columns or not counted."""
    if torch.compiler.is_compiling():
        return replace_by_gradient_in_one_pass(x_NV, logsumexp_N, column_N, scale, softcap)
    for x, logsumexp, column in row_chunks(_rows_per_chunk(x_NV), x_NV, logsumexp_N, column_N):
        gradient = torch.sub(x, logsumexp[:, None]).exp_()
        gradient.scatter_add_(1, column.clamp(min=0)[:, None], -(column >= 0).to(gradient.dtype)[:, None])
        if softcap is not None:
            gradient.addcmul_(gradient, x.square_(), value=-(softcap**-2))
        x.copy_(gradient if scale == 1 else gradient.mul_(scale))
        # Free this gradient before that of the next chunk is computed.
        del gradient
    return x_NV


def replace_by_gradient_in_one_pass(
    x_NV: Tensor, logsumexp_N: Tensor, column_N: Tensor, scale: float, softcap: float | None = None
) -> Tensor:
    """Compiled variant of `replace_by_gradient`: one pass over the logits."""
    is_target_NV = torch.arange(x_NV.shape[1], device=x_NV.device) == column_N[:, None]
    exact_NV = at_least_fp32(x_NV)
    probs_NV = (exact_NV - logsumexp_N[:, None]).exp()
    slope = 1 if softcap is None else 1 - (exact_NV / softcap).square()
    return x_NV.copy_((probs_NV - is_target_NV.to(probs_NV.dtype)) * slope * scale)


def _rows_per_chunk(x_NV: Tensor) -> int:
    return loss_chunk_rows(x_NV.shape[1], on_cuda=x_NV.is_cuda)


class Kernels(NamedTuple):
    """The kernels, either eager or compiled."""

    log_sum_exp: Callable[[Tensor], Tensor]
    replace_by_gradient: Callable[[Tensor, Tensor, Tensor, float, float | None], Tensor]
    replace_by_capped: Callable[[Tensor, float], Tensor] = replace_by_capped


EAGER = Kernels(log_sum_exp, replace_by_gradient)


class LossTerms(NamedTuple):
    """Weights of the losses of tokens, and sums by the group of each, such as the source of its text."""

    group_of_token: Tensor | None = None
    """Group of each token, int64 [N]; None: there are no groups."""
    sums: Tensor | None = None
    """Sum of each group, to which losses are added."""
    weight_of_token: Tensor | None = None
    """Factor of the loss of each token, [N]; None: 1."""

    def rows(self, rows: slice) -> LossTerms:
        """Return the terms of some tokens, with the same sums."""
        group, sums, weight = self
        return LossTerms(group if group is None else group[rows], sums, weight if weight is None else weight[rows])

    def weigh(self, loss_N: Tensor) -> Tensor:
        """Return the losses of the tokens times their weights, and add them to the sums of their groups."""
        if self.weight_of_token is not None:
            loss_N = loss_N * self.weight_of_token.to(loss_N.dtype)
        if self.group_of_token is not None and self.sums is not None:
            self.sums.index_add_(0, self.group_of_token, loss_N.detach().to(self.sums.dtype))
        return loss_N

    def weigh_gradient(self, gradient_NV: Tensor) -> None:
        """Multiply the gradients of the losses of tokens by their weights, in place."""
        if self.weight_of_token is not None:
            for gradient, weight in row_chunks(_rows_per_chunk(gradient_NV), gradient_NV, self.weight_of_token):
                gradient.mul_(weight[:, None])


@cache
def compiled_kernels() -> Kernels:
    """Return the compiled kernels; each of them is a single kernel on a GPU.

    While a profiler disables the compiler, they run the same code as `EAGER`."""
    return Kernels(torch.compile(log_sum_exp), torch.compile(replace_by_gradient), torch.compile(replace_by_capped))


class LossScale:
    """Factor of the loss in its backward pass.

    The forward pass already computes the gradient of the loss with this factor. Whether the backward pass uses the same
    factor is decided by the identity of its tensor, because reading the value would make the host wait for the GPU."""

    def __init__(self, factor: float = 1.0) -> None:
        self.factor = factor
        self._gradient: Tensor | None = None

    def run_backward(self, loss: Tensor) -> None:
        """Run the backward pass of the loss times the factor."""
        self._gradient = torch.full_like(loss, self.factor)
        try:
            loss.backward(self._gradient)
        finally:
            self._gradient = None

    def scale_saved_gradients(self, saved: tuple[Tensor, ...], gradient: Tensor) -> tuple[Tensor, ...]:
        """Return gradients of the loss times the factor, multiplied by `gradient` instead.

        Nothing is multiplied if `gradient` is the tensor of `run_backward`, perhaps passed on by sums of losses."""
        if gradient is not self._gradient:
            for tensor in saved:
                tensor.mul_(gradient / self.factor)
        return saved


UNSCALED = LossScale()


def in_place_cross_entropy(
    logits_BTV: Tensor,
    targets_BT: Tensor,
    ignored: int,
    terms: LossTerms | None = None,
    tp: TensorParallelProtocol | None = None,
    kernels: Kernels = EAGER,
    scale: LossScale = UNSCALED,
    softcap: float | None = None,
) -> Tensor:
    """Return the negative log-likelihood of the targets in nats, summed, at least in fp32.

    Logits that need a gradient are overwritten by it, and others by capped ones if they have a cap. They may be only
    this rank's columns; `tp` is then the group of ranks with the other columns. Targets equal to `ignored` are not
    counted. A backward pass other than `scale.run_backward` costs one more pass over the logits."""
    logits_NV = logits_BTV.flatten(0, 1)
    return cast(
        Tensor,
        _InPlaceCrossEntropy.apply(logits_NV, targets_BT.flatten(), ignored, tp, kernels, scale, softcap, terms),
    )


class _InPlaceCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_NV: Tensor,
        target_N: Tensor,
        ignored: int,
        tp: TensorParallelProtocol | None,
        kernels: Kernels,
        scale: LossScale,
        softcap: float | None,
        terms: LossTerms | None,
    ) -> Tensor:
        # It becomes a gradient, which must not keep the graph alive.
        x_NV = logits_NV.detach()
        needs_gradient = ctx.needs_input_grad[0]
        loss = sum_losses(x_NV, target_N, ignored, tp, kernels, scale if needs_gradient else None, softcap, terms)
        if needs_gradient:
            ctx.save_for_backward(x_NV)
            ctx.scale = scale
        return loss

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return *ctx.scale.scale_saved_gradients(ctx.saved_tensors, gradient), *[None] * 7


def sum_losses(
    x_NV: Tensor,
    target_N: Tensor,
    ignored: int,
    tp: TensorParallelProtocol | None,
    kernels: Kernels,
    scale: LossScale | None,
    softcap: float | None = None,
    terms: LossTerms | None = None,
) -> Tensor:
    """Return the loss of rows of logits, and replace the logits by their gradient unless `scale` is None.

    The other arguments are those of `in_place_cross_entropy`."""
    loss_N = losses_of_rows(x_NV, target_N, ignored, tp, kernels, scale, softcap)[0]
    if terms is not None:
        loss_N = terms.weigh(loss_N)
        if scale is not None:
            terms.weigh_gradient(x_NV)
    return loss_N.sum()


def losses_of_rows(
    x_NV: Tensor,
    target_N: Tensor,
    ignored: int,
    tp: TensorParallelProtocol | None,
    kernels: Kernels,
    scale: LossScale | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss of each row of logits, and the log-sum-exp and the column that `replace_by_gradient` needs, [N].

    The loss of a row whose target is `ignored` is 0. Logits are replaced by their gradient, or if `scale` is None by
    capped ones if they have a cap."""
    if softcap is not None:
        kernels.replace_by_capped(x_NV, softcap)
    logsumexp_N = kernels.log_sum_exp(x_NV)
    column_N = target_N - (0 if tp is None else tp.first_row)
    is_remote_N = (column_N < 0) | (column_N >= x_NV.shape[1])
    target_logit_N = x_NV.gather(1, column_N.masked_fill(is_remote_N, 0)[:, None])[:, 0].to(logsumexp_N.dtype)
    if tp is not None:
        logsumexp_N, target_logit_N = _sum_over_ranks(tp, logsumexp_N, target_logit_N.masked_fill_(is_remote_N, 0))
    is_ignored_N = target_N == ignored
    loss_N = (logsumexp_N - target_logit_N).masked_fill_(is_ignored_N, 0)
    # exp(x - infinity) is 0: rows that are not counted have no gradient.
    logsumexp_N = logsumexp_N.masked_fill(is_ignored_N, torch.inf)
    column_N = column_N.masked_fill_(is_remote_N | is_ignored_N, -1)
    if scale is not None:
        kernels.replace_by_gradient(x_NV, logsumexp_N, column_N, scale.factor, softcap)
    return loss_N, logsumexp_N, column_N


def _sum_over_ranks(tp: TensorParallelProtocol, logsumexp_N: Tensor, target_logit_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-sum-exp of full rows from that of this rank's columns, and the targets' logits."""
    max_N = logsumexp_N.clone()
    tp.all_reduce(max_N, dist.ReduceOp.MAX)
    terms = torch.stack([(logsumexp_N - max_N).exp_(), target_logit_N])
    total_N, target_logit_N = tp.all_reduce(terms, dist.ReduceOp.SUM).unbind()
    return total_N.log() + max_N, target_logit_N

"""Attention sinks: a learned logit per head joins the denominator of attention's softmax (gpt-oss).

A sink s turns the weights e^x / sum e^x into e^x / (sum e^x + e^s). The output is therefore that without sinks, scaled
by e^lse / (e^lse + e^s), where lse is the log-sum-exp of the scores. With the corrected output and log-sum-exp, the
backward pass of a flash kernel (arXiv 2307.08691, algorithm 2) computes the gradients of q, k and v as they are.

Shapes: N tokens, H heads, K head width."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

FLASH_FORWARD = torch.ops.aten._flash_attention_forward
FLASH_BACKWARD = torch.ops.aten._flash_attention_backward


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor | None) -> None:
    """Correct the output [..., K] and the log-sum-exp [...] (at least fp32) of attention in place; no-op without sinks.

    `sinks` are the logits of the heads, broadcast to `lse`."""
    if sinks is None:
        return
    corrected_lse = torch.logaddexp(lse, sinks.to(lse.dtype))
    out.mul_((lse - corrected_lse).exp_()[..., None])
    lse.copy_(corrected_lse)


def sinks_gradient(gradient: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None) -> Tensor | None:
    """Return the gradient of the sinks; None without sinks. `out` and `lse` are corrected by `add_sinks`."""
    if sinks is None:
        return None
    weight = (sinks.to(lse.dtype) - lse).exp_()
    return -(weight * (gradient.to(lse.dtype) * out).sum(-1)).sum_to_size(sinks.shape).to(sinks.dtype)


def attend_varlen_with_sinks(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, bounds: Tensor, max_length: int, earlier_keys: int
) -> Tensor:
    """Return flash attention within documents on CUDA, [N, H, K]; `varlen_attn` has no gradients of the log-sum-exp.

    Queries are [N, H, K], and the number of their heads is a multiple of that of keys and values; `sinks` are [H].
    `bounds` are those of `attention.Documents`, `max_length` the maximum length of a document. A query sees
    `earlier_keys` earlier keys, or all (-1)."""
    return cast(Tensor, _VarlenWithSinks.apply(q, k, v, sinks, bounds, max_length, earlier_keys))


class _VarlenWithSinks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, bounds: Tensor, max_length: int, earlier_keys: int
    ) -> Tensor:
        # Maximum lengths of queries and keys, dropout, and whether attention is causal without a window.
        ctx.flash_arguments = (max_length, max_length, 0.0, earlier_keys < 0)
        ctx.limits = {"window_size_left": earlier_keys, "window_size_right": 0}
        operands = (q, k, v, bounds, bounds)
        out, lse_HN, *random_state, _ = FLASH_FORWARD(*operands, *ctx.flash_arguments, False, **ctx.limits)
        add_sinks(out, lse_HN.T, sinks)
        ctx.save_for_backward(q, k, v, out, lse_HN, sinks, bounds, *random_state)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        *attention, lse_HN, sinks, bounds, seed, offset = ctx.saved_tensors
        gradient = gradient.contiguous()
        operands = (gradient, *attention, lse_HN, bounds, bounds)
        grads = FLASH_BACKWARD(*operands, *ctx.flash_arguments, seed, offset, **ctx.limits)
        return *grads, sinks_gradient(gradient, attention[-1], lse_HN.T, sinks), None, None, None

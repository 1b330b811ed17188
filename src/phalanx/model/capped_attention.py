"""Attention with capped scores on a CPU: softmax(c tanh(s / c)) v (Gemma 2, arXiv 2408.00118, section 2).

No kernel of PyTorch for CPUs caps scores. These two have the interface of its flash kernels, and are operators, so that
counters of FLOPs see each as one.

Shapes: B batch, H heads, t queries, K head width; keys may have fewer heads and other tokens."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from phalanx.model.dtypes import at_least_fp32

QUERIES = 256
"""Number of queries whose scores are in memory at one time."""


@torch.library.custom_op("phalanx::_scaled_dot_product_capped_attention", mutates_args=())
def capped_attention(
    query: Tensor, key: Tensor, value: Tensor, softcap: float, is_causal: bool, attn_mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return attention [B, H, t, K], and the log-sum-exp of its capped scores, [B, H, t], at least in fp32.

    `attn_mask` is added to capped scores, [t, keys]."""
    out = torch.empty_like(query)
    lse = query.new_empty(query.shape[:3], dtype=at_least_fp32(query[:0]).dtype)
    values = repeat_heads(value, query)
    for rows, capped, mask in _capped_scores(query, key, softcap, is_causal, attn_mask):
        scores = capped + mask
        lse[:, :, rows] = scores.logsumexp(-1)
        probs = (scores - lse[:, :, rows, None]).exp_()
        out[:, :, rows] = probs.to(value.dtype) @ values[:, :, : probs.shape[-1]]
    return out, lse


@torch.library.custom_op("phalanx::_scaled_dot_product_capped_attention_backward", mutates_args=())
def capped_attention_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    softcap: float,
    is_causal: bool,
    attn_mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values (FlashAttention-2, arXiv 2307.08691, algorithm 2).

    The cap multiplies the gradient of a score by 1 - (capped / c)^2. `out` and `lse` may be corrected for sinks."""
    grad_q = torch.empty_like(query)
    keys, values = (repeat_heads(x, query) for x in (key, value))
    grad_k, grad_v = (torch.zeros_like(x) for x in (keys, values))
    means = (at_least_fp32(gradient) * out).sum(-1, keepdim=True)
    scale = query.shape[-1] ** -0.5
    for rows, capped, mask in _capped_scores(query, key, softcap, is_causal, attn_mask):
        seen = slice(capped.shape[-1])
        probs = (capped + mask - lse[:, :, rows, None]).exp_()
        grad_probs = gradient[:, :, rows] @ values[:, :, seen].mT
        grad_scores = probs * (grad_probs - means[:, :, rows]) * (1 - (capped / softcap).square()) * scale
        grad_scores = grad_scores.to(query.dtype)
        grad_q[:, :, rows] = grad_scores @ keys[:, :, seen]
        grad_k[:, :, seen] += grad_scores.mT @ query[:, :, rows]
        grad_v[:, :, seen] += probs.to(query.dtype).mT @ gradient[:, :, rows]
    return grad_q, *(x.unflatten(1, (key.shape[1], -1)).sum(2) for x in (grad_k, grad_v))


@capped_attention.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, softcap: float, is_causal: bool, attn_mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(query), query.new_empty(query.shape[:3], dtype=at_least_fp32(query[:0]).dtype)


@capped_attention_backward.register_fake
def _(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    softcap: float,
    is_causal: bool,
    attn_mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _capped_scores(
    query: Tensor, key: Tensor, softcap: float, is_causal: bool, attn_mask: Tensor | None
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield some queries, their capped scores over the keys that any of them sees, and the mask of these scores."""
    keys = repeat_heads(at_least_fp32(key), query)
    for start in range(0, query.shape[2], QUERIES):
        rows = slice(start, min(start + QUERIES, query.shape[2]))
        seen = keys[:, :, : rows.stop] if is_causal else keys
        scores = at_least_fp32(query[:, :, rows]) @ seen.mT * query.shape[-1] ** -0.5
        mask = scores.new_zeros(scores.shape[-2:]) if attn_mask is None else attn_mask[rows].to(scores.dtype)
        if is_causal:
            hidden = torch.ones_like(mask, dtype=torch.bool).triu(rows.start + 1)
            mask = mask.masked_fill(hidden, float("-inf"))
        yield rows, scores.div_(softcap).tanh_().mul_(softcap), mask


def repeat_heads(x: Tensor, query: Tensor) -> Tensor:
    """Repeat key/value heads, one for each query head."""
    return x.repeat_interleave(query.shape[1] // x.shape[1], dim=1)

"""Attention to a part of the keys, with the log-sum-exp of its scores, and its gradients.

Shapes: B batch, H heads, t tokens of a rank, K head width."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from phalanx.model.attention import has_flash_kernel

CPU_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
CPU_ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
CUDA_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention
CUDA_ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_backward


def attention_with_lse(q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return attention [B, H, t, K] to some keys, and the log-sum-exp of its scores, [B, H, t].

    Args:
        q: Queries, [B, H, t, K].
        k: Keys, [B, heads, keys, K], of as many heads as queries or a divisor of their number.
        v: Values, like the keys.
        causal: True if query i sees the keys up to i; a mask replaces it.
        mask: Visible keys of each query, [B, 1, t, keys] bool; None without document boundaries.
    """
    if q.device.type == "cpu":
        out, lse = CPU_ATTENTION(q, k, v, 0.0, causal and mask is None, attn_mask=_additive_mask(mask, q))
    elif mask is None and has_flash_kernel(q.device, q.dtype, q.shape[-1]):
        out, lse, *_ = CUDA_ATTENTION(q, k, v, 0.0, causal)
    else:
        scores = _attention_scores(q, k, causal, mask=mask)
        lse = scores.logsumexp(-1)
        out = (scores - lse[..., None]).exp().nan_to_num().to(v.dtype) @ _repeat_kv_heads(v, q)
    if mask is not None:  # queries that see none of these keys
        lse = lse.masked_fill(~mask.any(-1), float("-inf"))
    return out, lse


def attention_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v (FlashAttention-2, arXiv 2307.08691, algorithm 2).

    Args:
        gradient: Gradient of `out`.
        q: Queries, [B, H, t, K].
        k: Keys, all or a part of them, [B, heads, keys, K].
        v: Values of these keys.
        out: Attention of the queries to all keys.
        lse: Log-sum-exp of the scores of all keys, [B, H, t].
        causal: True if query i sees the keys up to i; a mask replaces it.
        mask: Visible keys of each query, [B, 1, t, keys] bool; None without document boundaries.
    """
    if q.device.type == "cpu":
        operands = (x.contiguous() for x in (gradient, q, k, v, out, lse))
        return cast(
            tuple[Tensor, Tensor, Tensor],
            CPU_ATTENTION_BACKWARD(*operands, 0.0, causal and mask is None, attn_mask=_additive_mask(mask, q)),
        )
    if mask is None and has_flash_kernel(q.device, q.dtype, q.shape[-1]):
        operands = (x.contiguous() for x in (gradient, q, k, v, out, lse))
        dropout_state = q.new_empty(2, dtype=torch.int64)  # unused
        return cast(
            tuple[Tensor, Tensor, Tensor],
            CUDA_ATTENTION_BACKWARD(
                *operands, None, None, q.shape[2], k.shape[2], 0.0, causal, dropout_state, dropout_state
            ),
        )
    probs = (_attention_scores(q, k, causal, mask=mask) - lse[..., None]).exp()
    grad_probs = gradient @ _repeat_kv_heads(v, q).mT
    grad_scores = probs * (grad_probs - (gradient * out).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
    grad_k = grad_scores.mT.to(q.dtype) @ q
    grad_v = probs.mT.to(q.dtype) @ gradient
    shape = (k.shape[1], -1)
    return (
        grad_scores.to(q.dtype) @ _repeat_kv_heads(k, q),
        grad_k.unflatten(1, shape).sum(2),
        grad_v.unflatten(1, shape).sum(2),
    )


def _attention_scores(q: Tensor, k: Tensor, causal: bool, mask: Tensor | None) -> Tensor:
    accumulate_dtype = torch.promote_types(q.dtype, torch.float32)
    scores = q.to(accumulate_dtype) @ _repeat_kv_heads(k, q).to(accumulate_dtype).mT * q.shape[-1] ** -0.5
    if causal and mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    return scores if mask is None else scores.masked_fill(~mask, float("-inf"))


def _repeat_kv_heads(x: Tensor, q: Tensor) -> Tensor:
    """Repeat key/value heads, one for each query head."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def _additive_mask(mask: Tensor | None, like: Tensor) -> Tensor | None:
    return None if mask is None else torch.zeros_like(mask, dtype=like.dtype).masked_fill_(~mask, float("-inf"))

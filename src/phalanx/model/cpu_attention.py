"""Causal attention within documents on a CPU, with sliding windows, caps and sinks, without masks of T x T.

Shapes: N tokens of all documents, H heads, K head width."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor

from phalanx.model.attention_sinks import add_sinks, sinks_gradient
from phalanx.model.capped_attention import capped_attention, capped_attention_backward
from phalanx.model.dtypes import at_least_fp32

CPU_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
CPU_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
MIN_WINDOW_BLOCK = 128
"""Minimum number of queries of a window that are computed together."""


@torch.compiler.disable  # type: ignore[untyped-decorator]  # compiled code would be of one list of bounds
def attend_on_cpu(
    q_NHK: Tensor,
    k_NHK: Tensor,
    v_NHK: Tensor,
    sinks_H: Tensor | None,
    bounds: Tensor,
    window: int | None,
    softcap: float | None = None,
) -> Tensor:
    """Return causal attention within documents, [N, H, K]; arguments as in `attention.attend_within_documents`."""
    blocks = list(_split_window_blocks(bounds.tolist(), window))
    return cast(Tensor, _AttentionByDocument.apply(q_NHK, k_NHK, v_NHK, sinks_H, blocks, window, softcap))


def _split_window_blocks(bounds: list[int], window: int | None) -> Iterator[tuple[slice, slice]]:
    """Yield blocks of consecutive queries of one document, each with the keys that any of its queries sees.

    The first queries of a document see all earlier keys. Later blocks of n queries have n + window - 1 keys."""
    for start, end in pairwise(bounds):
        if window is None or end - start <= window:
            yield slice(start, end), slice(start, end)
            continue
        yield slice(start, start + window), slice(start, start + window)
        step = max(window, MIN_WINDOW_BLOCK)
        for first in range(start + window, end, step):
            last = min(first + step, end)
            yield slice(first, last), slice(first - window + 1, last)


def _build_window_mask(queries: slice, keys: slice, window: int | None, like: Tensor) -> Tensor | None:
    """Return the additive mask of a block of `_split_window_blocks`; None if queries see all earlier keys."""
    if window is None or (queries.start == keys.start and queries.stop - keys.start <= window):
        return None
    ends = (torch.arange(x.start, x.stop) for x in (queries, keys))
    distance = torch.sub(*torch.meshgrid(*ends, indexing="ij"))
    is_hidden = (distance < 0) | (distance >= window)
    return like.new_zeros(distance.shape).masked_fill_(is_hidden, float("-inf"))


class _AttentionByDocument(torch.autograd.Function):
    """Causal attention within documents on a CPU, by one kernel for each document or block of a window."""

    @staticmethod
    def forward(
        ctx: Any,
        q_NHK: Tensor,
        k_NHK: Tensor,
        v_NHK: Tensor,
        sinks_H: Tensor | None,
        blocks: list[tuple[slice, slice]],
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        kernel, _ = _choose_kernels(softcap)
        out_NHK = torch.empty_like(q_NHK)
        lse_NH = q_NHK.new_empty(q_NHK.shape[:2], dtype=at_least_fp32(q_NHK[:0]).dtype)
        for queries, keys in blocks:
            q, k, v = (_as_batch(x) for x in (q_NHK[queries], k_NHK[keys], v_NHK[keys]))
            mask = _build_window_mask(queries, keys, window, like=q_NHK)
            out, lse = kernel(q, k, v, is_causal=mask is None, attn_mask=mask)
            out_NHK[queries] = out[0].transpose(0, 1)
            lse_NH[queries] = lse[0].T
        add_sinks(out_NHK, lse_NH, sinks_H)
        ctx.save_for_backward(q_NHK, k_NHK, v_NHK, out_NHK, lse_NH, sinks_H)
        ctx.blocks = blocks
        ctx.window = window
        ctx.softcap = softcap
        return out_NHK

    @staticmethod
    def backward(ctx: Any, gradient_NHK: Tensor) -> tuple[Tensor | None, ...]:
        *attention, lse_NH, sinks_H = ctx.saved_tensors
        _, kernel = _choose_kernels(ctx.softcap)
        # Blocks of a window share keys, whose gradients add up.
        allocate = torch.empty_like if ctx.window is None else torch.zeros_like
        grads = [allocate(x) for x in attention[:3]]
        for queries, keys in ctx.blocks:
            tokens = (queries, queries, keys, keys, queries)
            mask = _build_window_mask(queries, keys, ctx.window, like=gradient_NHK)
            block_gradients = kernel(
                *(_as_batch(x[rows]) for x, rows in zip((gradient_NHK, *attention), tokens, strict=True)),
                lse_NH[queries].T[None],
                is_causal=mask is None,
                attn_mask=mask,
            )
            for grad, block, block_gradient in zip(grads, tokens[1:4], block_gradients, strict=True):
                if ctx.window is None:
                    grad[block] = block_gradient[0].transpose(0, 1)
                else:
                    grad[block] += block_gradient[0].transpose(0, 1)
        return *grads, sinks_gradient(gradient_NHK, attention[-1], lse_NH, sinks_H), None, None, None


def _choose_kernels(softcap: float | None) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the kernels of the forward and of the backward pass."""
    if softcap is None:
        return CPU_FLASH, partial(CPU_FLASH_BACKWARD, dropout_p=0.0)
    return partial(capped_attention, softcap=softcap), partial(capped_attention_backward, softcap=softcap)


def _as_batch(x_tHK: Tensor) -> Tensor:
    """Return the tokens of a document as a batch of one, [1, H, t, K]."""
    return x_tHK.transpose(0, 1)[None]

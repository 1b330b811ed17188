"""Attention to a part of the keys, its log-sum-exp and its gradients, and the parts that each step of a ring computes.

In a ring, documents need no mask. The tokens that a rank has of a document are contiguous, and in each step all its
queries see all its keys, or the keys up to themselves.

Shapes: B batch, H heads, t tokens of a rank, K head width."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise, product
from typing import cast

import torch
from torch import Tensor

from phalanx.model.attention import has_flash_kernel
from phalanx.model.capped_attention import repeat_heads
from phalanx.model.cpu_attention import CPU_FLASH, CPU_FLASH_BACKWARD
from phalanx.model.dtypes import at_least_fp32

CUDA_FLASH = torch.ops.aten._scaled_dot_product_flash_attention
CUDA_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_backward


def attention_with_lse(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Return attention [B, H, t, K] to some keys [B, heads, keys, K], and the log-sum-exp of its scores, [B, H, t].

    The number of query heads is a multiple of that of keys. If `causal`, query i sees the keys up to i, otherwise all.
    """
    if q.device.type == "cpu":
        return cast(tuple[Tensor, Tensor], CPU_FLASH(q, k, v, is_causal=causal))
    if has_flash_kernel(q.device, q.dtype, q.shape[-1]):
        out, lse, *_ = CUDA_FLASH(q, k, v, is_causal=causal)
        return out, lse
    return _plain_attention(q, k, v, causal)


def attention_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v (FlashAttention-2, arXiv 2307.08691, algorithm 2).

    `k` and `v` may be a part of the keys; `out` and `lse` are those of all keys."""
    operands = (x.contiguous() for x in (gradient, q, k, v, out, lse))
    if q.device.type == "cpu":
        return cast(tuple[Tensor, Tensor, Tensor], CPU_FLASH_BACKWARD(*operands, 0.0, causal))
    if has_flash_kernel(q.device, q.dtype, q.shape[-1]):
        dropout_state = q.new_empty(2, dtype=torch.int64)  # unused
        shared = (None, None, q.shape[2], k.shape[2], 0.0, causal, dropout_state, dropout_state)
        return cast(tuple[Tensor, Tensor, Tensor], CUDA_FLASH_BACKWARD(*operands, *shared))
    return _plain_attention_backward(gradient, q, k, v, out, lse, causal)


def _plain_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Compute what `attention_with_lse` returns for dtypes and head widths without a flash kernel on CUDA."""
    scores = _attention_scores(q, k, causal)
    lse = scores.logsumexp(-1)
    return (scores - lse[..., None]).exp().to(v.dtype) @ repeat_heads(v, q), lse


def _plain_attention_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of `_plain_attention`, as `attention_backward` returns them."""
    probs = (_attention_scores(q, k, causal) - lse[..., None]).exp()
    grad_probs = gradient @ repeat_heads(v, q).mT
    grad_scores = probs * (grad_probs - (gradient * out).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
    grad_k = grad_scores.mT.to(q.dtype) @ q
    grad_v = probs.mT.to(q.dtype) @ gradient
    grad_q = grad_scores.to(q.dtype) @ repeat_heads(k, q)
    shape = (k.shape[1], -1)
    return grad_q, grad_k.unflatten(1, shape).sum(2), grad_v.unflatten(1, shape).sum(2)


def _attention_scores(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    scores = at_least_fp32(q) @ at_least_fp32(repeat_heads(k, q)).mT * q.shape[-1] ** -0.5
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return scores


# -- ring --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RingBlock:
    """A rectangle of scores in a step of the ring: queries of this rank, and keys of another rank that they see."""

    rows: slice
    """Rows of the batch."""
    queries: slice
    """Tokens of this rank."""
    keys: slice
    """Tokens of the rank that has the keys."""
    causal: bool
    """True in the first step: query i sees the keys up to i. False if it sees all."""

    def attend(self, q: Tensor, kv: Tensor, out: Tensor, lse: Tensor) -> None:
        """Merge the attention to these keys, in place, into `out` and `lse` of the keys of earlier steps."""
        k, v = kv[:, self.rows, :, self.keys].unbind()
        q, out, lse = (x[self.rows, :, self.queries] for x in (q, out, lse))
        block_out, block_lse = attention_with_lse(q, k, v, self.causal)
        if self.causal:
            out.copy_(block_out)
            lse.copy_(block_lse)
            return
        merged_lse = torch.logaddexp(lse, block_lse)
        out.mul_((lse - merged_lse).exp()[..., None]).add_(block_out * (block_lse - merged_lse).exp()[..., None])
        lse.copy_(merged_lse)

    def gradients(
        self, gradient: Tensor, q: Tensor, kv: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of these queries, keys and values; `out` and `lse` are those of all keys."""
        k, v = kv[:, self.rows, :, self.keys].unbind()
        gradient, q, out, lse = (x[self.rows, :, self.queries] for x in (gradient, q, out, lse))
        return attention_backward(gradient, q, k, v, out, lse, self.causal)

    def add(self, gradients: tuple[Tensor, Tensor, Tensor], grad_q: Tensor, grad_kv: Tensor) -> None:
        """Add the result of `gradients` to the gradients of all tokens (in place)."""
        grad_q[self.rows, :, self.queries] += gradients[0]
        grad_kv[0, self.rows, :, self.keys] += gradients[1]
        grad_kv[1, self.rows, :, self.keys] += gradients[2]


@cache
def load_kernels(heads: int, kv_heads: int, width: int, *, dtype: torch.dtype, device: torch.device) -> None:
    """Run the kernels of a ring's steps once.

    The documents of a pipeline's rehearsal may be whole rows, or need no later steps. A kernel that CUDA loads while
    messages are under way can block forever (`PipelineStrategy._load_kernels`)."""
    q = torch.zeros(1, heads, 16, width, dtype=dtype, device=device)
    kv = q.new_zeros(2, 1, kv_heads, 16, width)
    out = torch.zeros_like(q, dtype=at_least_fp32(q[:0]).dtype)
    lse = out.new_zeros(q.shape[:3])
    grad_q = torch.zeros_like(out)
    grad_kv = torch.zeros_like(kv, dtype=out.dtype)
    # All of a contiguous tensor and a part of it have different kernels.
    for queries, keys in product((slice(16), slice(8, 16)), repeat=2):
        block = RingBlock(rows=slice(None), queries=queries, keys=keys, causal=queries == keys)
        block.attend(q, kv, out, lse=lse)
        block.add(block.gradients(q, q, kv, out=q, lse=lse), grad_q, grad_kv)


@dataclass(frozen=True)
class Ring:
    """The attention of one rank. It is not a plain list, because FSDP would search a list for tensors in each layer."""

    steps: list[list[RingBlock]]
    """Blocks of each step. In step i, the rank holds the keys of the rank i places before it."""


def find_ring_blocks(rank: int, ranks: int, row_tokens: int, bounds: Sequence[int] | None = None) -> Ring:
    """Return the blocks that a rank computes: each pair of one of its queries and a visible key, once.

    The `ranks` share rows of `row_tokens` in zig-zag order (`context_parallel.local_token_indices`). `bounds` are those
    of `Documents`; None if every row is one document."""
    piece = row_tokens // (2 * ranks)
    steps: list[list[RingBlock]] = [[] for _ in range(ranks)]
    for rows, document in _locate_documents(row_tokens, bounds):
        queries = _local_token_range(document, rank, ranks, piece)
        for step in range(ranks if queries else 0):
            source = (rank - step) % ranks
            keys = _local_token_range(document, source, ranks, piece)
            # All queries see the front piece of a lower rank. Those of the back piece see a higher rank's two pieces.
            first_query = max(queries.start, piece) if source > rank else queries.start
            last_key = min(keys.stop, piece) if source < rank else keys.stop
            if first_query < queries.stop and keys.start < last_key:
                block_queries = slice(first_query, queries.stop)
                block_keys = slice(keys.start, last_key)
                block = RingBlock(rows=rows, queries=block_queries, keys=block_keys, causal=step == 0)
                steps[step].append(block)
    return Ring(steps)


def _locate_documents(row_tokens: int, bounds: Sequence[int] | None) -> Iterator[tuple[slice, range]]:
    """Yield the batch rows of each document, and the positions that it covers within a row."""
    if bounds is None:
        yield slice(None), range(row_tokens)
        return
    for start, end in pairwise(bounds):
        row, position = divmod(start, row_tokens)
        yield slice(row, row + 1), range(position, position + end - start)


def _local_token_range(document: range, rank: int, ranks: int, piece: int) -> range:
    """Return which of a rank's tokens belong to a document. They are contiguous, although the rank has two pieces."""
    piece_starts = (rank * piece, (2 * ranks - 1 - rank) * piece)

    def count_before(position: int) -> int:
        return sum(min(max(position - start, 0), piece) for start in piece_starts)

    return range(count_before(document.start), count_before(document.stop))

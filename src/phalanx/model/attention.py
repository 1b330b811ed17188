"""Causal self-attention with grouped key/value heads.

Shapes: B batch, T tokens, D width, H heads, K head width, N documents of a batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

from phalanx.model.dtypes import at_least_fp32
from phalanx.model.norm import RMSNorm
from phalanx.model.products import ProductLinear
from phalanx.model.rotary import RotaryTable, apply_rotary
from phalanx.spec.model import ModelSpec, is_flash_head_dim

# cuDNN's backward pass with a mask gives NaN on H100 where T % 128 is 64 (pytorch issue 196678, torch 2.11).
MASKED_CUDA_KERNELS = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
# From torch 2.12 on grouped heads must be enabled; 2.11 supports them without an option.
_must_enable_gqa = "enable_gqa" in inspect.signature(varlen_attn).parameters
CPU_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
CPU_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
flash_by_document: Callable[..., Any] = partial(varlen_attn, enable_gqa=True) if _must_enable_gqa else varlen_attn


class Documents(NamedTuple):
    """The documents of a batch.

    The data loader counts them: counting on the device would block the host."""

    starts: Tensor
    """For each token, [B, T], the index in its row at which its document starts."""
    bounds: Tensor
    """Start of each document in the batch's B x T tokens, and their total number, int32 [N + 1]."""
    host_bounds: Sequence[int]
    """The same numbers on the host."""

    @classmethod
    def whole_rows(cls, rows: int, row_tokens: int, device: torch.device) -> Documents:
        """Return one document per row.

        Args:
            rows: Rows of the batch, B.
            row_tokens: Tokens of a row, T.
            device: Device of the tensors.
        """
        starts = torch.zeros(rows, row_tokens, dtype=torch.int32, device=device)
        bounds = torch.arange(rows + 1, dtype=torch.int32, device=device) * row_tokens
        return cls(starts, bounds, range(0, rows * row_tokens + 1, row_tokens))

    @classmethod
    def single_tokens_first(cls, rows: int, row_tokens: int, device: torch.device) -> Documents:
        """Return two documents per row, of one token and of the others.

        Args:
            rows: Rows of the batch, B.
            row_tokens: Tokens of a row, T.
            device: Device of the tensors.
        """
        starts = torch.ones(rows, row_tokens, dtype=torch.int32, device=device)
        starts[:, 0] = 0
        host_bounds = [row * row_tokens + first for row in range(rows) for first in (0, 1)] + [rows * row_tokens]
        return cls(starts, torch.tensor(host_bounds, dtype=torch.int32, device=device), host_bounds)


class Attention(nn.Module):
    """softmax(q k^T / sqrt(K)) v over earlier tokens of the same document, and a projection to D."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.head_dim = spec.head_dim
        self.qk_norm = spec.qk_norm
        self.rotate: Callable[[Tensor, RotaryTable], Tensor] = apply_rotary
        query = spec.num_heads * spec.head_dim
        value = spec.num_kv_heads * spec.head_dim
        self.wq = ProductLinear(spec.hidden_size, query, bias=spec.bias)
        self.wk = ProductLinear(spec.hidden_size, value, bias=spec.bias)
        self.wv = ProductLinear(spec.hidden_size, value, bias=spec.bias)
        self.wo = ProductLinear(query, spec.hidden_size, bias=spec.bias)
        if spec.qk_norm != "none":
            per_head = spec.qk_norm == "head"
            self.q_norm = RMSNorm(spec.head_dim if per_head else query, spec.norm_eps)
            self.k_norm = RMSNorm(spec.head_dim if per_head else value, spec.norm_eps)

    def forward(self, x_BTD: Tensor, rotary: RotaryTable | None, mask: Tensor | None) -> Tensor:
        """Return the output of the layer, [B, T, D].

        Args:
            x_BTD: Input, already normalized.
            rotary: Table of `rotary_table` for the positions of the tokens; None for learned positions.
            mask: Result of `attention_mask`; None if all earlier tokens of the row are visible.
        """
        q, k, v = self.project_in(x_BTD)
        if self.qk_norm == "full":
            q, k = self.q_norm(q), self.k_norm(k)
        q_BTHK = self._split_heads(q)
        k_BTHK = self._split_heads(k)
        v_BTHK = self._split_heads(v)
        if self.qk_norm == "head":
            q_BTHK, k_BTHK = self.q_norm(q_BTHK), self.k_norm(k_BTHK)
        if rotary is not None:
            q_BTHK, k_BTHK = self.rotate(q_BTHK, rotary), self.rotate(k_BTHK, rotary)
        return self.project_out(self.attend(q_BTHK, k_BTHK, v_BTHK, mask).flatten(2))

    def project_in(self, x_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, with the heads concatenated."""
        return self.wq(x_BTD), self.wk(x_BTD), self.wv(x_BTD)

    def project_out(self, heads_BTQ: Tensor) -> Tensor:
        """Project the outputs of the heads to the width of the residual stream."""
        return self.wo(heads_BTQ)

    @staticmethod
    def attend(q_BTHK: Tensor, k_BTHK: Tensor, v_BTHK: Tensor, mask: Tensor | None) -> Tensor:
        """Return each query's weighted mean of the values, [B, T, H, K], over visible earlier tokens.

        Args:
            q_BTHK: Queries.
            k_BTHK: Keys, of as many heads as queries or a divisor of their number.
            v_BTHK: Values, of as many heads as keys; their dtype is that of the products.
            mask: Result of `attention_mask`; None if all earlier tokens of the row are visible.
        """
        q_BTHK, k_BTHK = q_BTHK.to(v_BTHK.dtype), k_BTHK.to(v_BTHK.dtype)  # norms may have cast them to fp32
        if mask is not None and mask.ndim == 1:
            return attend_within_documents(q_BTHK, k_BTHK, v_BTHK, bounds=mask)
        grouped = q_BTHK.shape[2] != k_BTHK.shape[2]
        if grouped and mask is not None:
            # On CUDA flash supports no mask, and the efficient kernel no groups.
            k_BTHK, v_BTHK = (x.repeat_interleave(q_BTHK.shape[2] // x.shape[2], dim=2) for x in (k_BTHK, v_BTHK))
            grouped = False
        with sdpa_kernel(MASKED_CUDA_KERNELS) if mask is not None else nullcontext():
            out_BHTK = F.scaled_dot_product_attention(
                q_BTHK.transpose(1, 2),
                k_BTHK.transpose(1, 2),
                v_BTHK.transpose(1, 2),
                attn_mask=mask,
                is_causal=mask is None,
                enable_gqa=grouped,
            )
        return out_BHTK.transpose(1, 2)

    def _split_heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))


def attention_mask(documents: Documents, dtype: torch.dtype, head_dim: int) -> Tensor:
    """Return the mask argument of attention.

    It is the bounds of the documents if there is a kernel for them, otherwise their dense mask.

    Args:
        documents: Documents of the batch.
        dtype: Dtype in which attention computes.
        head_dim: Head width, K.
    """
    if attends_without_mask(documents.bounds.device, dtype, head_dim):
        return documents.bounds
    return document_mask(documents.starts)


def document_mask(starts_BT: Tensor) -> Tensor:
    """Return the mask of visible tokens, [B, 1, T, T] bool: earlier ones of the same document."""
    same = starts_BT[:, None, :, None] == starts_BT[:, None, None, :]
    return same.tril()


def attends_without_mask(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Return whether attention within documents has a kernel without a mask.

    Args:
        device: Device that computes.
        dtype: Dtype in which attention computes.
        head_dim: Head width, K.
    """
    return device.type == "cpu" or has_flash_kernel(device, dtype, head_dim)


def has_flash_kernel(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Return whether flash attention runs on CUDA.

    Args:
        device: Device that computes.
        dtype: Dtype in which attention computes.
        head_dim: Head width, K.
    """
    is_half = dtype in (torch.bfloat16, torch.float16)
    return device.type == "cuda" and is_half and is_flash_head_dim(head_dim)


def attend_within_documents(q_BTHK: Tensor, k_BTHK: Tensor, v_BTHK: Tensor, bounds: Tensor) -> Tensor:
    """Return causal attention, [B, T, H, K], within consecutive documents.

    On an H100 it takes 3.5 ms where a dense mask takes 62 (16,384 tokens in rows of 8,192,
    docs/results/benchmarks/gpu-attention.md).

    Args:
        q_BTHK: Queries.
        k_BTHK: Keys, of as many heads as queries or a divisor of their number.
        v_BTHK: Values, of as many heads as keys.
        bounds: Bounds of the documents in the B x T tokens, as in `Documents`.
    """
    packed = [x.flatten(0, 1) for x in (q_BTHK, k_BTHK, v_BTHK)]
    if q_BTHK.device.type == "cpu":
        return _attend_on_cpu(*packed, bounds).view_as(q_BTHK)
    row = q_BTHK.shape[1]  # no document is longer
    out: Tensor = flash_by_document(*packed, bounds, bounds, row, row, window_size=(-1, 0))
    return out.view_as(q_BTHK)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # compiled code would be of one list of bounds
def _attend_on_cpu(q_NHK: Tensor, k_NHK: Tensor, v_NHK: Tensor, bounds: Tensor) -> Tensor:
    return cast(Tensor, _AttentionByDocument.apply(q_NHK, k_NHK, v_NHK, bounds.tolist()))


class _AttentionByDocument(torch.autograd.Function):
    """Causal attention within documents on a CPU, by PyTorch's flash kernel for each document."""

    @staticmethod
    def forward(ctx: Any, q_NHK: Tensor, k_NHK: Tensor, v_NHK: Tensor, bounds: list[int]) -> Tensor:
        out_NHK = torch.empty_like(q_NHK)
        lse_NH = q_NHK.new_empty(q_NHK.shape[:2], dtype=at_least_fp32(q_NHK[:0]).dtype)
        for start, end in pairwise(bounds):
            q, k, v = (_as_batch(x[start:end]) for x in (q_NHK, k_NHK, v_NHK))
            out, lse = CPU_FLASH(q, k, v, is_causal=True)
            out_NHK[start:end] = out[0].transpose(0, 1)
            lse_NH[start:end] = lse[0].T
        ctx.save_for_backward(q_NHK, k_NHK, v_NHK, out_NHK, lse_NH)
        ctx.bounds = bounds
        return out_NHK

    @staticmethod
    def backward(ctx: Any, gradient_NHK: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        *attention, lse_NH = ctx.saved_tensors
        grad_q, grad_k, grad_v = (torch.empty_like(x) for x in attention[:3])
        for start, end in pairwise(ctx.bounds):
            operands = (_as_batch(x[start:end]) for x in (gradient_NHK, *attention))
            parts = CPU_FLASH_BACKWARD(*operands, lse_NH[start:end].T[None], 0.0, True)
            for whole, part in zip((grad_q, grad_k, grad_v), parts, strict=True):
                whole[start:end] = part[0].transpose(0, 1)
        return grad_q, grad_k, grad_v, None


def _as_batch(x_tHK: Tensor) -> Tensor:
    """Return the tokens of a document as a batch of one, [1, H, t, K]."""
    return x_tHK.transpose(0, 1)[None]

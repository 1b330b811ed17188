"""Causal self-attention with grouped key/value heads.

Shapes: B batch, T tokens, D width, H heads, K head width."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

from phalanx.model.attention_sinks import attend_varlen_with_sinks
from phalanx.model.cpu_attention import attend_on_cpu
from phalanx.model.flex_attention import attend_with_flex
from phalanx.model.part import PartModule
from phalanx.model.products import IDENTITY, ProductLinear, TensorTuple, activated_linear, declared_activation
from phalanx.model.rotary import RotaryTable, apply_rotary
from phalanx.model.sequence_context import Documents, SequenceContext
from phalanx.spec.attention_backend import AttentionBackend, choose_backend
from phalanx.spec.model import ModelSpec
from phalanx.spec.parts.attention import LATE_NORMS
from phalanx.spec.parts.operations import Part

# cuDNN's backward pass with a mask gives NaN on H100 where T % 128 is 64 (pytorch issue 196678, torch 2.11).
MASKED_CUDA_KERNELS = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
# From torch 2.12 on grouped heads must be enabled; 2.11 supports them without an option.
_must_enable_gqa = "enable_gqa" in inspect.signature(varlen_attn).parameters
flash_by_document: Callable[..., Any] = partial(varlen_attn, enable_gqa=True) if _must_enable_gqa else varlen_attn


class Attention(PartModule):
    """softmax(q k^T / sqrt(K)) v over earlier tokens of the same document, and a projection to D.

    Queries may have a factor that grows with their position. Layers with a window, or in chunks, see its tokens only.
    A cap c makes of scores s c tanh(s / c). Sinks are logits of the softmax without a value. Layers without keys and
    values of their own read those of another one."""

    sinks: Tensor | None
    q_norm: nn.Module
    k_norm: nn.Module
    v_norm: nn.Module
    wo: ProductLinear

    def __init__(self, layer: ModelSpec, part: Part) -> None:
        """Create the attention of a layer (`spec.layers`) from its declaration."""
        super().__init__(part)
        self.window = layer.sliding_window
        self.softcap = layer.attention_softcap
        if not layer.attention_sinks:
            self.sinks = None
        self.head_dim = layer.head_dim
        self.rope = layer.rope if layer.position_embedding == "rope" else None
        self.qk_norm = layer.qk_norm
        self.norms_rotated = layer.qk_norm in LATE_NORMS
        self.query_scale = layer.query_scale
        self.chunk = layer.attention_chunk
        self.clip = layer.attention_clip
        self.columns = part.input_products()
        self.gate = IDENTITY if layer.attention_gate == "none" else declared_activation(part)
        self.temperature = layer.query_temperature
        self.value_width = layer.value_width
        self.value_scale = layer.value_scale
        self.value_norm = layer.value_norm
        self.values_from_keys = layer.values_from_keys
        self.returns_keys = False
        """True if other layers read the keys and values."""
        self.rotate: Callable[[Tensor, RotaryTable], Tensor] = apply_rotary
        self.core = attend

    def sequence_inputs(self, context: SequenceContext) -> tuple[RotaryTable | None, Tensor | None, Any]:
        """Return the rotary table, the factor of queries and the mask."""
        table = context.rotary(self.rope, self.head_dim) if self.rope else None
        temperature = context.temperature(self.temperature) if self.temperature else None
        return table, temperature, context.mask(self.head_dim, self.chunk)

    def forward(
        self,
        x_BTD: Tensor,
        rotary: RotaryTable | None,
        temperature: Tensor | None,
        mask: Tensor | None,
        *keys_and_values: Tensor,
    ) -> Tensor | TensorTuple:
        """Return the output of the layer, [B, T, D], for a normalized input.

        The keys and values [B, T, H, K] follow if others read them; if given, they are those of another layer. Learned
        positions have no `rotary` table. Without a `mask`, all earlier tokens of the row are visible."""
        if keys_and_values:
            q, *gate = self.read_input(self.project_in, x_BTD)
            own: list[Tensor] = [q]
        else:
            q, k, *others = self.read_input(self.project_in, x_BTD)
            v, *gate = [k, *others] if self.values_from_keys else others
            own = [q, k, v]
        if self.qk_norm == "full":
            own = self._norm_queries_and_keys(own)
        widths = (self.head_dim, self.head_dim, self.value_width)
        own = [x.unflatten(-1, (-1, width)) for x, width in zip(own, widths, strict=False)]
        if self.qk_norm in ("head", "each_head"):
            own = self._norm_queries_and_keys(own)
        if self.value_norm:
            own[2:] = (self.v_norm(x) for x in own[2:])
        if self.clip:
            own = [x.clamp(-self.clip, self.clip) for x in own]
        if rotary is not None:
            own[:2] = (self.rotate(x, rotary) for x in own[:2])
        if self.norms_rotated:
            own = self._norm_queries_and_keys(own)
        own += keys_and_values
        q_BTHK, k_BTHK, v_BTHK = own
        if self.query_scale != 1.0:
            q_BTHK = q_BTHK * self.query_scale
        if self.value_scale != 1.0:
            v_BTHK = v_BTHK * self.value_scale
        if temperature is not None:
            q_BTHK = (q_BTHK * temperature).to(q_BTHK.dtype)
        dials = {"window": self.window, "sinks_H": self.sinks, "softcap": self.softcap}
        out_BTD = self.core(q_BTHK, k_BTHK, v_BTHK, mask, **dials).flatten(2)
        out_BTD = activated_linear(self.wo, self.gate, *gate, out_BTD) if gate else self.wo(out_BTD)
        return (out_BTD, k_BTHK, v_BTHK) if self.returns_keys else out_BTD

    def _norm_queries_and_keys(self, own: list[Tensor]) -> list[Tensor]:
        """Return queries, and keys and values if they are the layer's own, with norms of the first two."""
        norms = [self.q_norm] if len(own) == 1 else [self.q_norm, self.k_norm]
        return [*(norm(x) for norm, x in zip(norms, own, strict=False)), *own[2:]]

    def project_in(self, x_BTD: Tensor) -> TensorTuple:
        """Return queries, keys, values unless these are keys, and the gate of the output, if there is one.

        Heads are concatenated. Layers that read other keys and values have none."""
        return self.project(x_BTD, *self.columns)


def attend(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHK: Tensor,
    mask: Tensor | None,
    window: int | None = None,
    sinks_H: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Return each query's weighted mean of the values, [B, T, H, K], over visible earlier tokens.

    The number of query heads is a multiple of that of keys and values, whose dtype is that of the products. Without
    a `mask`, every row is one document. A query sees at most `window` keys, itself included. `sinks_H` are logits
    in the softmax's denominator, `softcap` is the cap of scores. Narrower values are padded, because flash kernels have
    one width."""
    if (width := v_BTHK.shape[-1]) < q_BTHK.shape[-1]:
        v_BTHK = F.pad(v_BTHK, (0, q_BTHK.shape[-1] - width))
        return attend(q_BTHK, k_BTHK, v_BTHK, mask, window, sinks_H, softcap)[..., :width]
    q_BTHK, k_BTHK = q_BTHK.to(v_BTHK.dtype), k_BTHK.to(v_BTHK.dtype)  # norms may have cast them to fp32
    window = None if window is None or window >= q_BTHK.shape[1] else window
    has_dials = window is not None or sinks_H is not None or softcap is not None
    if mask is None and has_dials:
        mask = _row_bounds(q_BTHK, softcap=softcap is not None)
    if mask is not None and mask.ndim == 1:
        return attend_within_documents(q_BTHK, k_BTHK, v_BTHK, mask, window, sinks_H, softcap)
    if has_dials or (mask is not None and mask.ndim == 2):
        return attend_with_flex(q_BTHK, k_BTHK, v_BTHK, mask, window, sinks_H, softcap)
    grouped = q_BTHK.shape[2] != k_BTHK.shape[2]
    if grouped and mask is not None:
        # On CUDA, flash attention supports no mask, and the memory-efficient kernel supports no grouped heads.
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


def attention_mask(
    documents: Documents,
    dtype: torch.dtype,
    head_dim: int,
    window: bool = False,
    sinks: bool = False,
    softcap: bool = False,
) -> Tensor:
    """Return the mask argument of attention.

    It is the bounds of the documents if there is a kernel for them. Otherwise it is their dense mask, or for
    FlexAttention their starts. `window`: rows are longer than the window of some layers."""
    backend = _choose_document_backend(documents.bounds.device, dtype, head_dim, window, sinks, softcap)
    if backend == AttentionBackend.FLEX:
        return documents.starts
    return document_mask(documents.starts) if backend == AttentionBackend.SDPA_MASKED else documents.bounds


def _choose_document_backend(
    device: torch.device, dtype: torch.dtype, head_dim: int, window: bool, sinks: bool, softcap: bool = False
) -> AttentionBackend:
    """Return the kernel for rows that may contain several documents."""
    half = dtype in (torch.bfloat16, torch.float16)
    return choose_backend(
        device.type,
        half_precision=half,
        head_dim=head_dim,
        documents=True,
        window=window,
        sinks=sinks,
        softcap=softcap,
    )


def _row_bounds(q_BTHK: Tensor, softcap: bool) -> Tensor | None:
    """Return the bounds of whole rows as documents, for windows, sinks and caps; None if FlexAttention computes."""
    backend = _choose_document_backend(
        q_BTHK.device, q_BTHK.dtype, head_dim=q_BTHK.shape[-1], window=True, sinks=True, softcap=softcap
    )
    if backend == AttentionBackend.FLEX:
        return None
    rows, tokens = q_BTHK.shape[:2]
    return torch.arange(0, rows * tokens + 1, tokens, dtype=torch.int32, device=q_BTHK.device)


def document_mask(starts_BT: Tensor) -> Tensor:
    """Return the mask of visible tokens, [B, 1, T, T] bool: earlier ones of the same document."""
    same = starts_BT[:, None, :, None] == starts_BT[:, None, None, :]
    return same.tril()


def has_flash_kernel(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Return whether flash attention runs on CUDA."""
    return _choose_document_backend(device, dtype, head_dim, window=False, sinks=False) == AttentionBackend.VARLEN


def attend_within_documents(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHK: Tensor,
    bounds: Tensor,
    window: int | None = None,
    sinks_H: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Return causal attention, [B, T, H, K], within consecutive documents.

    On an H100 it takes 3.5 ms where a dense mask takes 62 (16,384 tokens in rows of 8,192,
    docs/results/benchmarks/gpu-attention.md). Arguments are those of `attend`, and the `bounds` of
    `Documents`."""
    packed = (q_BTHK.flatten(0, 1), k_BTHK.flatten(0, 1), v_BTHK.flatten(0, 1))
    if q_BTHK.device.type == "cpu":
        return attend_on_cpu(*packed, sinks_H, bounds, window, softcap).view_as(q_BTHK)
    row = q_BTHK.shape[1]  # no document is longer
    earlier_keys = -1 if window is None else window - 1
    if sinks_H is not None:
        return attend_varlen_with_sinks(*packed, sinks_H, bounds, row, earlier_keys).view_as(q_BTHK)
    out: Tensor = flash_by_document(*packed, bounds, bounds, row, row, window_size=(earlier_keys, 0))
    return out.view_as(q_BTHK)

"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

Shapes: B batch, T tokens, D width, H heads, K width of their queries and keys, V of their values, R rotated channels,
L latent of keys and values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.model.attention import attend
from phalanx.model.part import PartModule, multiply_each
from phalanx.model.products import IDENTITY, ProductLinear, TensorTuple, activated_linear, declared_activation
from phalanx.model.rotary import RotaryTable, apply_rotary
from phalanx.model.sequence_context import SequenceContext
from phalanx.spec.model import ModelSpec
from phalanx.spec.parts.operations import Part


class LatentAttention(PartModule):
    """softmax(q k^T / sqrt(K)) v, where heads of k and v are products of a latent, and R channels of k are shared."""

    q_latent_norm: nn.Module
    latent_norm: nn.Module
    wq_a: ProductLinear
    wkv_a: ProductLinear
    wk_rope: ProductLinear
    wo: ProductLinear

    def __init__(self, layer: ModelSpec, part: Part) -> None:
        """Create the mixer of a layer (`spec.layers`) from its declaration."""
        super().__init__(part)
        self.has_query_latent = "wq_a.weight" in part.parameters
        self.head_dim = layer.head_dim
        self.rope = layer.rope if layer.position_embedding == "rope" else None
        self.rotary_width = layer.rotary_width
        self.temperature = layer.query_temperature
        self.query_scale = layer.query_scale
        self.gate = IDENTITY if layer.attention_gate == "none" else declared_activation(part)
        self.columns = tuple(
            linear.name for linear in part.linears if linear.reads == (part.input,) and linear.role == "column"
        )
        self.rotate: Callable[[Tensor, RotaryTable], Tensor] = apply_rotary
        self.core = attend

    def sequence_inputs(self, context: SequenceContext) -> tuple[RotaryTable | None, Tensor | None, Any]:
        """Return the rotary table, the factor of queries, and the mask."""
        table = context.rotary(self.rope, self.rotary_width) if self.rope else None
        temperature = context.temperature(self.temperature) if self.temperature else None
        return table, temperature, context.mask(self.head_dim)

    def forward(
        self, x_BTD: Tensor, rotary: RotaryTable | None, temperature: Tensor | None, mask: Tensor | None
    ) -> Tensor:
        """Return the output of the layer, [B, T, D], for a normalized input."""
        latent_BTL, key_BTR, q, *gate = self.read_input(self.project_in, x_BTD)
        if self.has_query_latent:
            (q,) = self.project(self.q_latent_norm(q), "wq_b")
        k, v = self.project(self.latent_norm(latent_BTL), "wk_b", "wv_b")
        heads = q.shape[-1] // self.head_dim
        q_BTHK, k_BTHN, v_BTHV = (x.unflatten(-1, (heads, -1)) for x in (q, k, v))
        key_BT1R = self.gather_tokens(key_BTR).unsqueeze(2)
        if self.query_scale != 1.0:
            q_BTHK = q_BTHK * self.query_scale
        if rotary is not None:
            q_BTHK, key_BT1R = self.rotate(q_BTHK, rotary), self.rotate(key_BT1R, rotary)
        if temperature is not None:
            q_BTHK = (q_BTHK * temperature).to(q_BTHK.dtype)
        # Rotated channels are the first of a head.
        k_BTHK = torch.cat((key_BT1R.expand(*k_BTHN.shape[:3], -1), k_BTHN), dim=-1)
        out_BTD = self.core(q_BTHK, k_BTHK, v_BTHV, mask).flatten(2)
        return activated_linear(self.wo, self.gate, *gate, out_BTD) if gate else self.wo(out_BTD)

    def project_in(self, x_BTD: Tensor) -> TensorTuple:
        """Return the latent of keys and values, the key of all heads, queries or their latent, and gates if any."""
        copied = [self.wkv_a, self.wk_rope, *([self.wq_a] if self.has_query_latent else [])]
        columns = self.project(x_BTD, *self.columns) if self.columns else ()
        return *multiply_each(x_BTD, *copied), *columns

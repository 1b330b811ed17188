"""Causal self-attention with grouped key/value heads.

Shapes: B batch, T tokens, D width, H heads, K head width."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.model.norm import RMSNorm
from phalanx.model.rotary import RotaryTable, apply_rotary
from phalanx.spec.model import ModelSpec

# Devices whose fused kernels take grouped heads together with a mask. On CUDA flash takes no mask and the others no
# groups, which leaves the kernel that holds all T x T scores.
GQA_MASK_DEVICES = ("cpu",)


class Attention(nn.Module):
    """softmax(q k^T / sqrt(K)) v over earlier tokens of the same document, then a projection back to D."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.head_dim = spec.head_dim
        self.qk_norm = spec.qk_norm
        query, value = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self.wq = nn.Linear(spec.hidden_size, query, bias=spec.bias)
        self.wk = nn.Linear(spec.hidden_size, value, bias=spec.bias)
        self.wv = nn.Linear(spec.hidden_size, value, bias=spec.bias)
        self.wo = nn.Linear(query, spec.hidden_size, bias=spec.bias)
        if spec.qk_norm != "none":
            per_head = spec.qk_norm == "head"
            self.q_norm = RMSNorm(spec.head_dim if per_head else query, spec.norm_eps)
            self.k_norm = RMSNorm(spec.head_dim if per_head else value, spec.norm_eps)

    def forward(self, x_BTD: Tensor, rotary: RotaryTable | None, mask_B1TT: Tensor | None) -> Tensor:
        q, k, v = self.project_in(x_BTD)
        if self.qk_norm == "full":
            q, k = self.q_norm(q), self.k_norm(k)
        q_BTHK, k_BTHK, v_BTHK = self._split_heads(q), self._split_heads(k), self._split_heads(v)
        if self.qk_norm == "head":
            q_BTHK, k_BTHK = self.q_norm(q_BTHK), self.k_norm(k_BTHK)
        if rotary is not None:
            q_BTHK, k_BTHK = apply_rotary(q_BTHK, rotary), apply_rotary(k_BTHK, rotary)
        return self.project_out(self.attend(q_BTHK, k_BTHK, v_BTHK, mask_B1TT).flatten(2))

    def project_in(self, x_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, their heads side by side."""
        return self.wq(x_BTD), self.wk(x_BTD), self.wv(x_BTD)

    def project_out(self, heads_BTQ: Tensor) -> Tensor:
        """What the heads say, in the residual stream's width."""
        return self.wo(heads_BTQ)

    def attend(self, q_BTHK: Tensor, k_BTHK: Tensor, v_BTHK: Tensor, mask_B1TT: Tensor | None) -> Tensor:
        """Each query's mean of the values, [B, T, H, K]."""
        grouped = q_BTHK.shape[2] != k_BTHK.shape[2]
        if grouped and mask_B1TT is not None and v_BTHK.device.type not in GQA_MASK_DEVICES:
            k_BTHK, v_BTHK = (x.repeat_interleave(q_BTHK.shape[2] // x.shape[2], dim=2) for x in (k_BTHK, v_BTHK))
            grouped = False
        out_BHTK = F.scaled_dot_product_attention(
            q_BTHK.transpose(1, 2).to(v_BTHK.dtype),  # norms may have lifted q and k to fp32
            k_BTHK.transpose(1, 2).to(v_BTHK.dtype),
            v_BTHK.transpose(1, 2),
            attn_mask=mask_B1TT,
            is_causal=mask_B1TT is None,
            enable_gqa=grouped,
        )
        return out_BHTK.transpose(1, 2)

    def _split_heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))

"""The position-wise network of a block. Shapes: D width, F inner width."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.spec.model import ModelSpec


class SwiGLU(nn.Module):
    """down(silu(gate x) * up x) (GLU variants, arXiv 2002.05202)."""

    def __init__(self, width: int, ffn: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, ffn, bias=False)
        self.up = nn.Linear(width, ffn, bias=False)
        self.down = nn.Linear(ffn, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class GELU(nn.Module):
    """down(gelu(up x)) (GPT-2)."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.up = nn.Linear(spec.width, spec.ffn, bias=spec.bias)
        self.down = nn.Linear(spec.ffn, spec.width, bias=spec.bias)
        self.approximate = "tanh" if spec.activation == "gelu_tanh" else "none"

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate=self.approximate))


def mlp(spec: ModelSpec) -> nn.Module:
    """The dense MLP that `spec` describes."""
    return SwiGLU(spec.width, spec.ffn) if spec.activation == "swiglu" else GELU(spec)

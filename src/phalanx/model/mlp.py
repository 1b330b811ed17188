"""The position-wise network of a block. Shapes: D width, F inner width."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.spec.model import ModelSpec


class SwiGLUMLP(nn.Module):
    """down(silu(gate x) * up x) (GLU variants, arXiv 2002.05202)."""

    def __init__(self, width: int, ffn: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, ffn, bias=False)
        self.up = nn.Linear(width, ffn, bias=False)
        self.down = nn.Linear(ffn, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output, with the shape of `x`."""
        gate, up = self.project_in(x)
        return self.project_out(F.silu(gate) * up)

    def project_in(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Project to the inner width: gate and up."""
        return self.gate(x), self.up(x)

    def project_out(self, hidden: Tensor) -> Tensor:
        """Project to the width of the residual stream."""
        return self.down(hidden)


class GELUMLP(nn.Module):
    """down(gelu(up x)) (GPT-2)."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.up = nn.Linear(spec.hidden_size, spec.ffn_hidden_size, bias=spec.bias)
        self.down = nn.Linear(spec.ffn_hidden_size, spec.hidden_size, bias=spec.bias)
        self.approximate = "tanh" if spec.activation == "gelu_tanh" else "none"

    def forward(self, x: Tensor) -> Tensor:
        """Return the output, with the shape of `x`."""
        (up,) = self.project_in(x)
        return self.project_out(F.gelu(up, approximate=self.approximate))

    def project_in(self, x: Tensor) -> tuple[Tensor]:
        """Project to the inner width."""
        return (self.up(x),)

    def project_out(self, hidden: Tensor) -> Tensor:
        """Project to the width of the residual stream."""
        return self.down(hidden)


def build_mlp(spec: ModelSpec) -> nn.Module:
    """Build the dense MLP of `spec`."""
    return SwiGLUMLP(spec.hidden_size, spec.ffn_hidden_size) if spec.activation == "swiglu" else GELUMLP(spec)

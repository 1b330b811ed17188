"""Norms of the residual stream and of queries and keys."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.spec.model import ModelSpec


class RMSNorm(nn.Module):
    """x / rms(x) x weight over the last axis (arXiv 1910.07467)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size))

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalized tensor."""
        # PyTorch's fused kernel requires one dtype; it accumulates in fp32 for every dtype.
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


def build_norm(spec: ModelSpec) -> nn.Module:
    """Build the norm of the residual stream."""
    kind = RMSNorm if spec.norm == "rmsnorm" else nn.LayerNorm
    return kind(spec.hidden_size, spec.norm_eps)

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
        # PyTorch's fused kernel wants one dtype; it accumulates in fp32 whatever that is.
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


def build_norm(spec: ModelSpec) -> nn.Module:
    """The norm of the residual stream."""
    kind = RMSNorm if spec.norm == "rmsnorm" else nn.LayerNorm
    return kind(spec.hidden_size, spec.norm_eps)

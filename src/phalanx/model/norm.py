"""Norms of the residual stream and of queries and keys."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.model.dtypes import at_least_fp32
from phalanx.spec.model import ModelSpec


class RMSNorm(nn.Module):
    """x / rms(x) x weight over the last axis (arXiv 1910.07467)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size))

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalized tensor."""
        if x.device.type == "cuda":  # one kernel, which requires one dtype and accumulates in fp32
            return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)
        return cast(Tensor, _RMSNorm.apply(x, self.weight, self.eps))


class _RMSNorm(torch.autograd.Function):
    """CUDA's kernel for other devices, where PyTorch also saves x in fp32 and x / rms(x).

    With r = 1 / rms(x) and n = x r, the gradient of x is r (g w - n mean(g w n)), and that of the weight sum(g n)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        exact = at_least_fp32(x)
        inverse_rms = (exact.square().mean(-1, keepdim=True) + eps).rsqrt()
        ctx.save_for_backward(x, weight, inverse_rms)
        return (exact * inverse_rms).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, inverse_rms = ctx.saved_tensors
        normalized = at_least_fp32(x) * inverse_rms
        exact = at_least_fp32(gradient)
        grad_weight = (exact * normalized).flatten(0, -2).sum(0)
        grad_normalized = exact * weight
        mean = (grad_normalized * normalized).mean(-1, keepdim=True)
        grad_x = grad_normalized.sub_(normalized.mul_(mean)).mul_(inverse_rms)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None


def build_norm(spec: ModelSpec) -> nn.Module:
    """Build the norm of the residual stream."""
    kind = RMSNorm if spec.norm == "rmsnorm" else nn.LayerNorm
    return kind(spec.hidden_size, spec.norm_eps)

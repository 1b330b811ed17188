"""Norms of the residual stream and of queries and keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.model.chunks import cached_rows
from phalanx.model.dtypes import at_least_fp32
from phalanx.spec.parts.operations import Norm


class RMSNorm(nn.Module):
    """x / rms(x) x weight over the last axis (arXiv 1910.07467), or x (1 + weight)."""

    def __init__(self, size: int, eps: float, has_offset: bool = False) -> None:
        super().__init__()
        self.eps = eps
        self.has_offset = has_offset
        self.weight = nn.Parameter(torch.empty(size))
        self.normalize: Callable[[Tensor, Tensor, float], Tensor] = rms_norm

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalized tensor."""
        return self.normalize(x, 1 + at_least_fp32(self.weight) if self.has_offset else self.weight, self.eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / rms(x) x weight over the last axis."""
    # On CUDA this is one kernel, which requires one dtype and accumulates in fp32.
    if x.device.type == "cuda":
        return F.rms_norm(x, weight.shape, weight.to(x.dtype), eps)
    return cast(Tensor, _RMSNorm.apply(x, weight, eps))


class _RMSNorm(torch.autograd.Function):
    """CUDA's kernel for other devices, where PyTorch also saves x in fp32 and x / rms(x).

    With r = 1 / rms(x) and n = x r, the gradient of x is r (g w - n mean(g w n)), and that of the weight sum(g n)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = x.new_empty(x.shape)
        inverse_rms = x.new_empty((*x.shape[:-1], 1), dtype=torch.promote_types(x.dtype, torch.float32))
        for x_part, rms_part, out_part in cached_rows(x, inverse_rms, out):
            exact = at_least_fp32(x_part)
            torch.rsqrt(exact.square().mean(-1, keepdim=True) + eps, out=rms_part)
            out_part.copy_((exact * rms_part).mul_(weight))
        ctx.save_for_backward(x, weight, inverse_rms)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, inverse_rms = ctx.saved_tensors
        grad_x = x.new_empty(x.shape)
        grad_weight = at_least_fp32(weight).new_zeros(weight.shape)
        for x_part, rms_part, gradient_part, grad_part in cached_rows(x, inverse_rms, gradient, grad_x):
            normalized = at_least_fp32(x_part) * rms_part
            exact = at_least_fp32(gradient_part)
            grad_weight += (exact * normalized).sum(0)
            grad_normalized = exact * weight
            mean = (grad_normalized * normalized).mean(-1, keepdim=True)
            grad_part.copy_(grad_normalized.sub_(normalized.mul_(mean)).mul_(rms_part))
        return grad_x, grad_weight.to(weight.dtype), None


def make_norm(norm: Norm) -> nn.Module:
    """Return the module of a declared norm."""
    if norm.kind == "layernorm":
        return nn.LayerNorm(norm.width, norm.eps)
    return RMSNorm(norm.width, norm.eps, norm.has_offset)

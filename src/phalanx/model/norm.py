"""Norms of the residual stream and of queries and keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.model.chunks import CPU_CHUNK_ELEMENTS, cached_rows, row_chunks
from phalanx.model.dtypes import at_least_fp32
from phalanx.spec.parts.operations import GatedNorm, Norm


def identity(x: Tensor) -> Tensor:
    """Return a tensor as it is."""
    return x


class RMSNorm(nn.Module):
    """x / rms(x) x weight over the last axis (arXiv 1910.07467), or x (1 + weight), or without a weight."""

    weight: Tensor | None

    def __init__(self, size: int, eps: float, has_offset: bool = False, has_weight: bool = True) -> None:
        super().__init__()
        self.eps = eps
        self.has_offset = has_offset
        self.register_parameter("weight", nn.Parameter(torch.empty(size)) if has_weight else None)
        self.normalize: Callable[[Tensor, Tensor | None, float], Tensor] = rms_norm

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalized tensor."""
        weight = self.weight
        return self.normalize(
            x, 1 + at_least_fp32(weight) if weight is not None and self.has_offset else weight, self.eps
        )


SMALL_ELEMENTS = 1 << 15
"""Size up to which calls take longer than their arithmetic, as in the generation of single tokens."""


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Return x / rms(x) x weight over the last axis."""
    # On CUDA this is one kernel, which requires one dtype and accumulates in fp32.
    if x.device.type == "cuda":
        return F.rms_norm(x, x.shape[-1:], None if weight is None else weight.to(x.dtype), eps)
    if x.numel() <= SMALL_ELEMENTS and not torch.is_grad_enabled():
        exact = at_least_fp32(x)
        normalized = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + eps)
        return (normalized if weight is None else normalized.mul_(weight)).to(x.dtype)
    return cast(Tensor, _RMSNorm.apply(x, weight, eps))


class HeadLayerNorm(nn.Module):
    """LayerNorm (arXiv 1607.06450) of each head without a bias, with a weight for each (Cohere's Command R+).

    A LayerNorm is an RMSNorm of differences from the mean, which are saved in place of the input."""

    def __init__(self, heads: int, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(heads, width))

    def forward(self, x_HK: Tensor) -> Tensor:
        """Return the normalized heads, [..., H, K]."""
        centered = x_HK - x_HK.mean(-1, keepdim=True)
        return cast(Tensor, _RMSNorm.apply(centered, self.weight, self.eps))


class _RMSNorm(torch.autograd.Function):
    """CUDA's kernel for other devices, where PyTorch also saves x in fp32 and x / rms(x).

    The weight may be that of each of several vectors, [H, K].
    With r = 1 / rms(x) and n = x r, the gradient of x is r (g w - n mean(g w n)), and that of the weight sum(g n)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        out = x.new_empty(x.shape)
        inverse_rms = x.new_empty((*x.shape[:-1], 1), dtype=torch.promote_types(x.dtype, torch.float32))
        ndim = 1 if weight is None else weight.ndim
        for x_part, rms_part, out_part in cached_rows(x, inverse_rms, out, row_ndim=ndim):
            exact = at_least_fp32(x_part)
            torch.rsqrt(exact.square().mean(-1, keepdim=True) + eps, out=rms_part)
            normalized = exact * rms_part
            out_part.copy_(normalized if weight is None else normalized.mul_(weight))
        ctx.save_for_backward(x, weight, inverse_rms)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, inverse_rms = ctx.saved_tensors
        grad_x = x.new_empty(x.shape)
        is_trained = ctx.needs_input_grad[1]
        grad_weight = at_least_fp32(weight).new_zeros(weight.shape) if is_trained else None
        ndim = 1 if weight is None else weight.ndim
        for x_part, rms_part, gradient_part, grad_part in cached_rows(x, inverse_rms, gradient, grad_x, row_ndim=ndim):
            normalized = at_least_fp32(x_part) * rms_part
            exact = at_least_fp32(gradient_part)
            if grad_weight is not None:
                grad_weight += (exact * normalized).sum(0)
            grad_normalized = exact.clone() if weight is None else exact * weight
            mean = (grad_normalized * normalized).mean(-1, keepdim=True)
            grad_part.copy_(grad_normalized.sub_(normalized.mul_(mean)).mul_(rms_part))
        return grad_x, None if grad_weight is None else grad_weight.to(weight.dtype), None


class GatedRMSNorm(nn.Module):
    """RMSNorm of silu(gate) x over groups of channels (Mamba-2, arXiv 2405.21060, section 7.1)."""

    def __init__(self, channels: int, width: int, eps: float) -> None:
        """Create the norm of groups of `width` channels."""
        super().__init__()
        self.width = width
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(channels))
        self.sum_over_ranks: Callable[[Tensor], Tensor] = identity
        """Sum of a number of each token over the ranks that share a group, which may be in place."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Return the normalized tensor, [..., channels]."""
        return cast(Tensor, _GatedRMSNorm.apply(x, gate, self.weight, self.width, self.eps, self.sum_over_ranks))


class _GatedRMSNorm(torch.autograd.Function):
    """The norm, whose backward pass computes silu(gate) x again, in chunks of tokens."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gate: Tensor,
        weight: Tensor,
        width: int,
        eps: float,
        sum_over_ranks: Callable[[Tensor], Tensor],
    ) -> Tensor:
        ctx.width = width
        ctx.sum_over_ranks = sum_over_ranks
        shape = (*x.shape[:-1], max(1, x.shape[-1] // width), -1)
        out = torch.empty_like(x)
        square = at_least_fp32(x.new_empty(0)).new_empty((*shape[:-1], 1))
        for x_part, gate_part, square_part in _split_groups(shape, x, gate, square):
            gated = F.silu(at_least_fp32(gate_part)).mul_(x_part)
            torch.sum(gated.square_(), -1, keepdim=True, out=square_part)
        inverse_rms = sum_over_ranks(square).div_(width).add_(eps).rsqrt_()
        weight_groups = weight.view(shape[-2:])
        for x_part, gate_part, rms_part, out_part in _split_groups(shape, x, gate, inverse_rms, out):
            gated = F.silu(at_least_fp32(gate_part)).mul_(x_part)
            out_part.copy_(gated.mul_(rms_part).mul_(weight_groups))
        ctx.save_for_backward(x, gate, weight, inverse_rms)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, weight, inverse_rms = ctx.saved_tensors
        shape = (*inverse_rms.shape[:-1], -1)
        weight_groups = at_least_fp32(weight).view(shape[-2], -1)
        grad_x = torch.empty_like(x)
        grad_gate = torch.empty_like(gate)
        grad_weight = torch.zeros_like(weight_groups)
        mean = torch.empty_like(inverse_rms)
        for x_part, gate_part, rms_part, mean_part, gradient_part in _split_groups(
            shape, x, gate, inverse_rms, mean, gradient
        ):
            normalized = F.silu(at_least_fp32(gate_part)).mul_(x_part).mul_(rms_part)
            product = normalized.mul_(gradient_part)
            grad_weight += product.sum(0)
            torch.sum(product.mul_(weight_groups), -1, keepdim=True, out=mean_part)
        mean = ctx.sum_over_ranks(mean).div_(ctx.width)
        for x_part, gate_part, rms_part, mean_part, gradient_part, grad_x_part, grad_gate_part in _split_groups(
            shape, x, gate, inverse_rms, mean, gradient, grad_x, grad_gate
        ):
            exact_gate = at_least_fp32(gate_part)
            sigmoid = exact_gate.sigmoid()
            silu = exact_gate * sigmoid
            normalized = (silu * x_part).mul_(rms_part)
            grad_gated = (gradient_part * weight_groups).sub_(normalized.mul_(mean_part)).mul_(rms_part)
            grad_x_part.copy_(silu * grad_gated)
            # The derivative of silu(z) is sigmoid(z) + silu(z) (1 - sigmoid(z)).
            grad_gate_part.copy_(grad_gated.mul_(x_part).mul_(silu.mul_(1 - sigmoid).add_(sigmoid)))
        return grad_x, grad_gate, grad_weight.flatten().to(weight.dtype), None, None, None


def _split_groups(shape: tuple[int, ...], *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield chunks of tokens of tensors [..., channels], as [tokens, groups, width]; on GPUs all tokens at once."""
    by_group = [tensor.view(*shape[:-1], -1).flatten(0, -3) for tensor in tensors]
    # Half as many as those of other norms, because there are twice as many tensors.
    rows = max(1, CPU_CHUNK_ELEMENTS // 2 // tensors[0].shape[-1])
    return row_chunks(len(by_group[0]) if tensors[0].is_cuda else rows, *by_group)


def make_norm(norm: Norm) -> nn.Module:
    """Return the module of a declared norm."""
    if isinstance(norm, GatedNorm):
        return GatedRMSNorm(norm.parameters["weight"].numbers, norm.width, norm.eps)
    if norm.kind == "head_layernorm":
        heads, width = norm.parameters["weight"].shape
        return HeadLayerNorm(heads, width, norm.eps)
    has_weight = "weight" in norm.parameters
    if norm.kind == "layernorm":
        return nn.LayerNorm(norm.width, norm.eps, elementwise_affine=has_weight, bias="bias" in norm.parameters)
    return RMSNorm(norm.width, norm.eps, norm.has_offset, has_weight)

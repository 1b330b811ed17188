"""Matrix products in float8: e4m3 operands with one scale per row.

Scales are dynamic: each row of both operands has its own, along the dimension that the product sums over (torchao's
"rowwise" recipe). They are powers of two, as in torchao, so that scaling is exact: only the cast to three bits of
mantissa rounds. Outputs and input gradients are such products. Weight gradients stay in the dtype of their operands, as
in torchao's "rowwise_with_gw_hp", its most accurate recipe (torchao/float8/config.py): they sum over tokens, along
which both operands would need a second cast.

Operands are cast when they are multiplied, and saved for the backward pass as they were. GPUs multiply in float8. CPUs
have no such product and multiply the numbers that the casts represent, which are exact in bf16.

Why: `docs/design/decisions/fp8-products.md`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.model.moe import Experts, grouped_linear
from phalanx.model.part import PartModule
from phalanx.model.products import Product

FP8 = torch.float8_e4m3fn
MANTISSA_BITS = 23
"""Bits of an fp32 number below its exponent."""
EXPONENT_MASK = 0xFF << MANTISSA_BITS
MANTISSAS_ABOVE_448 = 0x1FFFFF
"""Number of mantissas above that of 448 = 1.75 x 2^8, the maximum of e4m3: adding it rounds the exponent up."""
EXPONENT_SUM = 2 * 127
"""Sum of the exponents, with their bias, of a power of two and of its inverse."""
MIN_EXPONENT = 9
"""Rounded exponent of rows of zeros, at which the scale and its inverse are normal numbers."""


def fp8_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x W^T + b for rows [..., I], with both operands of the product in float8.

    W, [O, I], has the dtype of the rows. I and O are multiples of 16."""
    rows = cast_rows(x.flatten(0, -2))
    columns = cast_rows(weight)
    if not x.is_cuda:
        return F.linear(rows.restore(x.dtype).view_as(x), columns.restore(x.dtype), bias)
    product = torch._scaled_mm(
        rows.numbers,
        columns.numbers.T,
        scale_a=rows.scales,
        scale_b=columns.scales.T,
        out_dtype=x.dtype,
        use_fast_accum=True,
    ).unflatten(0, x.shape[:-1])
    return product if bias is None else product + bias


def fp8_grouped_linear(x_NI: Tensor, weight_EOI: Tensor, offsets_E: Tensor) -> Tensor:
    """Return `grouped_linear`, with both operands of the product in float8. I and O are multiples of 16."""
    rows = cast_rows(x_NI)
    columns = cast_rows(weight_EOI)
    if not x_NI.is_cuda:
        return grouped_linear(rows.restore(x_NI.dtype), columns.restore(x_NI.dtype), offsets_E)
    return torch._scaled_grouped_mm(
        rows.numbers,
        columns.numbers.transpose(1, 2),
        scale_a=rows.scales.squeeze(-1),
        scale_b=columns.scales.squeeze(-1),
        offs=offsets_E.to(x_NI.device, torch.int32),
        out_dtype=x_NI.dtype,
        use_fast_accum=True,
    )


@dataclass(frozen=True)
class Fp8Rows:
    """Rows in float8, each with a power of two as its scale."""

    numbers: Tensor
    """e4m3, [..., N, I]."""
    scales: Tensor
    """fp32, [..., N, 1]."""

    def restore(self, dtype: torch.dtype) -> Tensor:
        """Return the numbers that these represent, which are exact in bf16 and fp32."""
        return self.numbers.to(dtype) * self.scales.to(dtype)


def cast_rows(x: Tensor) -> Fp8Rows:
    """Cast rows to float8, with the smallest power of two as scale at which a row's maximum is at most 448.

    The power is found in the bits of the maximum, where no logarithm is rounded."""
    maximum = torch.linalg.vector_norm(x, torch.inf, dim=-1, keepdim=True).float()
    exponent_bits = (maximum.view(torch.int32) + MANTISSAS_ABOVE_448) & EXPONENT_MASK
    scale_bits = exponent_bits.clamp(min=MIN_EXPONENT << MANTISSA_BITS) - (8 << MANTISSA_BITS)
    inverse = ((EXPONENT_SUM << MANTISSA_BITS) - scale_bits).view(torch.float32)
    scales = scale_bits.view(torch.float32) + 0 * maximum  # NaN if infinite: a cast may replace infinity by 448
    return Fp8Rows((x * inverse.to(x.dtype)).to(FP8, memory_format=torch.contiguous_format), scales)


def use_fp8_products(module: nn.Module) -> None:
    """Make the linear layers of blocks and the experts of a model multiply in float8.

    Embedding, norms, routers and head are unchanged."""
    for submodule in module.modules():
        if isinstance(submodule, Experts):
            submodule.grouped_linear = fp8_grouped_linear
        elif isinstance(submodule, PartModule):
            for linear in submodule.part.linears:
                if not linear.is_precise:
                    getattr(submodule, linear.name).product = Product(linear=fp8_linear)

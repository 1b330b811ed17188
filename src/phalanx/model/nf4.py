"""Weights in 4 bits, as in QLoRA (arXiv 2305.14314, section 3): NormalFloat numbers in blocks with one scale each.

A block is 64 numbers of a row. Its scale is their largest absolute value, by which they are divided, and each becomes
the nearest of 16 numbers (equation 4: quantiles of a normal distribution in [-1, 1], with an exact zero). A block is
stored as 36 bytes, so that a part of the rows or of the blocks of a matrix is stored in a part of its bytes: the scale
in fp32, then two codes in each byte, the first in the high half.

A product computes the matrix from it in both passes, and keeps neither (`model.products`).

Why: `docs/design/decisions/nf4-blocks.md`."""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.model.chunks import cached_rows, rows_at_once
from phalanx.spec.parts.operations import NF4_BLOCK, NF4_BLOCK_BYTES, NF4_SCALE_BYTES

NF4_VALUES = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""Numbers of the codes (arXiv 2305.14314, appendix E)."""


def quantize(weight: Tensor) -> Tensor:
    """Return the bytes [..., 36 B] of a weight [..., 64 B]."""
    *rows_shape, columns = weight.shape
    num_bytes = columns // NF4_BLOCK * NF4_BLOCK_BYTES
    packed = torch.empty(*rows_shape, num_bytes, dtype=torch.uint8, device=weight.device)
    midpoints = torch.tensor(NF4_VALUES, device=weight.device).unfold(0, 2, 1).mean(1)
    for rows, packed_rows in cached_rows(weight, packed):
        blocks = rows.float().unflatten(-1, (-1, NF4_BLOCK))
        scales = blocks.abs().amax(-1, keepdim=True)
        # A block of zeros has the scale 0.
        normalized = (blocks / scales.clamp(min=torch.finfo(torch.float32).tiny)).contiguous()
        codes = torch.bucketize(normalized, midpoints, out_int32=True).to(torch.uint8)
        scale_bytes, pairs = _split_blocks(packed_rows)
        scale_bytes.copy_(scales.view(torch.uint8))
        pairs.copy_(codes[..., ::2] << 4 | codes[..., 1::2])
    return packed


def dequantize(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weight [..., 64 B] that bytes represent, which are the numbers of their codes times fp32 scales."""
    weight = torch.empty(shape_of_numbers(packed.shape), dtype=dtype, device=packed.device)
    values = torch.tensor(NF4_VALUES, device=packed.device)
    values_of_bytes = torch.cartesian_prod(values, values)
    for packed_rows, rows in rows_at_once(packed, weight):
        scale_bytes, pairs = _split_blocks(packed_rows)
        scales = scale_bytes.contiguous().view(torch.float32)
        rows.copy_(values_of_bytes[pairs.int()].flatten(-2).mul_(scales).flatten(-2))
    return weight


def numbers_of_bytes(size: int) -> int:
    """Return how many numbers some bytes of a row represent."""
    return size // NF4_BLOCK_BYTES * NF4_BLOCK


def shape_of_numbers(packed: torch.Size) -> torch.Size:
    """Return the shape of a weight from that of its bytes."""
    return torch.Size((*packed[:-1], numbers_of_bytes(packed[-1])))


def dense(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a weight as it is, or in a dtype if it is quantized."""
    return weight if weight.is_floating_point() else dequantize(weight, dtype)


def _split_blocks(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Return views of the bytes of the scale of each block, [..., B, 4], and of those of its codes, [..., B, 32]."""
    blocks = packed.unflatten(-1, (-1, NF4_BLOCK_BYTES))
    return blocks[..., :NF4_SCALE_BYTES], blocks[..., NF4_SCALE_BYTES:]

"""Weights in 4 bits: numbers of bitsandbytes, and shards."""

from __future__ import annotations

import torch

from phalanx.model.nf4 import dequantize, quantize
from phalanx.spec.parts.operations import NF4_BLOCK, NF4_BLOCK_BYTES

WEIGHT = (torch.arange(256) ** 2 % 127 - 63).view(2, 128) / 8
WEIGHT[1, :64] = 0
WEIGHT[1, 64:] *= 100
"""Blocks of different sizes, one of which is zero."""
SCALES = [7.875, 7.875, 0.0, 787.5]
CODES = (
    "000012357adf148d038e16d18e3c1a19091b2d4fa2e92fb51eb731fec9754322"
    "2234579cef137be15bf29e2af4d2b19091a1c3e81d61e830d841fda753210000"
    "7777777777777777777777777777777777777777777777777777777777777777"
    "234579cef137be15bf29e2af4d2b19091a1c3e81d61e830d841fda7532100000"
)
"""Both of WEIGHT by `bitsandbytes.functional.quantize_4bit(WEIGHT, blocksize=64, quant_type="nf4")` of bitsandbytes
0.50.2, computed in an environment of its own."""
SUM = -4798.498321771622
"""Sum of the numbers that its `dequantize_4bit` returns, in fp64."""


def test_codes_scales_and_numbers_are_those_of_bitsandbytes() -> None:
    blocks = quantize(WEIGHT).view(4, NF4_BLOCK_BYTES)
    assert blocks[:, :4].contiguous().view(torch.float32).flatten().tolist() == SCALES
    assert bytes(blocks[:, 4:].flatten().tolist()).hex() == CODES
    assert dequantize(quantize(WEIGHT), torch.float32).double().sum().item() == SUM


def test_part_of_a_stack_has_a_part_of_its_bytes() -> None:
    stack = torch.randn(3, 5, 4 * NF4_BLOCK, generator=torch.Generator().manual_seed(1))
    packed = quantize(stack)
    part = packed[1:, 2:4, NF4_BLOCK_BYTES : 3 * NF4_BLOCK_BYTES]
    assert torch.equal(quantize(stack[1:, 2:4, NF4_BLOCK : 3 * NF4_BLOCK]), part)
    whole = dequantize(packed, torch.float64)
    assert torch.equal(dequantize(part, torch.float64), whole[1:, 2:4, NF4_BLOCK : 3 * NF4_BLOCK])


def test_numbers_of_codes_are_quantized_without_error() -> None:
    packed = quantize(torch.randn(8, 2 * NF4_BLOCK, generator=torch.Generator().manual_seed(2)))
    assert torch.equal(quantize(dequantize(packed, torch.float32)), packed)

"""Quantization in blocks of 256 numbers that share a scale.

In a block with the largest absolute value a, x is stored as the integer nearest to x Q / a, from -Q to Q. Source:
Dettmers et al., arXiv 2110.02861, section 2.1, with uniform steps."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.spec.swarm import CODEC_BLOCK_SIZE


def quantize_blocks(flat: Tensor, max_code: int) -> tuple[Tensor, Tensor]:
    """Quantize numbers [..., n] to int8 codes and fp32 scales.

    Returns codes [..., blocks, 256], the last block padded with zeros, and scales [..., blocks]. The scale of a block
    with values that are not finite is not finite."""
    missing = -flat.shape[-1] % CODEC_BLOCK_SIZE
    blocks = (F.pad(flat, (0, missing)) if missing else flat).unflatten(-1, (-1, CODEC_BLOCK_SIZE))
    scale = blocks.abs().amax(dim=-1) / max_code
    codes = (blocks / torch.where(scale > 0, scale, 1.0)[..., None]).round().clamp(-max_code, max_code)
    return codes.nan_to_num().to(torch.int8), scale


def dequantize_blocks(codes: Tensor, scale: Tensor, count: int) -> Tensor:
    """Return the numbers of rows of blocks, fp32 [..., count], without the padding of the last block.

    `codes` are [..., blocks, 256], `scale` is [..., blocks] fp32."""
    return (codes.float() * scale[..., None]).flatten(-2)[..., :count]

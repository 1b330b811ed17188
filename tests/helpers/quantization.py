"""Error bounds of quantization."""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.parallel.int8_blocks import dequantize_blocks, quantize_blocks
from phalanx.spec.swarm import Codec
from phalanx.swarm.codec import MAX_CODE, decode
from phalanx.swarm.pieces import ModelPiece


def quantization_error_bound(data: bytes | bytearray, item: ModelPiece, codec: Codec) -> Tensor:
    """Return the maximum error of each number of a coded piece: half a step of its block, and the rounding."""
    blocks, scale = quantize_blocks(decode(data, item.shape, codec).flatten(), MAX_CODE[codec])
    return dequantize_blocks(torch.ones_like(blocks), 0.501 * scale, item.num_elements).reshape(item.shape)

"""Codecs of tensors: fp32, bf16, or blocks of 8 or 4 bits with a common scale.

An encoded tensor contains its scales (fp32, little-endian), one per 256 elements, and then its elements in order. A
byte contains two int4 elements, the first in its lower half. `parallel.int8_blocks` defines the elements; Q is 127 or
7.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.cost.exact.swarm import SCALED_CODECS, encoded_bytes
from phalanx.model.dtypes import TORCH_DTYPES
from phalanx.parallel.int8_blocks import dequantize_blocks, quantize_blocks
from phalanx.spec.swarm import CODEC_BLOCK_SIZE, Codec

MAX_CODE = {"int8": 127, "int4": 7}


class CodecError(ValueError):
    """Bytes that are not an encoded tensor."""


Buffer = bytes | bytearray | memoryview
"""Types that can be written to a file."""


def encode(tensor: Tensor, codec: Codec) -> Buffer:
    """Encode a tensor; the bytes of fp32 share its memory.

    Values that are not finite remain so in fp32 and bf16, and make their block NaN in the other codecs.
    """
    flat = tensor.detach().to("cpu", torch.float32).reshape(-1)
    if codec not in SCALED_CODECS:
        return _as_bytes(flat.to(TORCH_DTYPES[codec]))
    quantized, scale = quantize_blocks(flat, MAX_CODE[codec])
    quantized = quantized.reshape(-1)[: flat.numel()]
    return b"".join([_as_bytes(scale), _as_bytes(quantized if codec == "int8" else _pack_int4(quantized))])


def decode(data: Buffer, shape: tuple[int, ...], codec: Codec) -> Tensor:
    """Decode a tensor to fp32; from a bytearray in fp32 it shares the memory.

    Raises CodecError if the number of bytes is wrong.
    """
    data = data if isinstance(data, bytearray) else bytearray(data)
    numel = int(torch.Size(shape).numel())
    if len(data) != encoded_bytes(numel, codec):
        size = f"which has {encoded_bytes(numel, codec)}"
        raise CodecError(f"{len(data)} bytes are not a tensor of shape {list(shape)} in {codec}, {size}")
    if not numel:
        return torch.zeros(shape)
    if codec not in SCALED_CODECS:
        return torch.frombuffer(data, dtype=TORCH_DTYPES[codec]).float().reshape(shape)
    num_blocks = -(-numel // CODEC_BLOCK_SIZE)
    raw = torch.frombuffer(data, dtype=torch.uint8)
    scale = raw[: 4 * num_blocks].view(torch.float32)
    quantized = raw[4 * num_blocks :]
    values = quantized.view(torch.int8) if codec == "int8" else _unpack_int4(quantized)[:numel]
    blocks = F.pad(values, (0, -numel % CODEC_BLOCK_SIZE)).view(-1, CODEC_BLOCK_SIZE)
    return dequantize_blocks(blocks, scale, numel).reshape(shape)


def _pack_int4(values: Tensor) -> Tensor:
    pairs = F.pad(values, (0, len(values) % 2)).view(-1, 2).to(torch.uint8)
    return (pairs[:, 0] & 15) | (pairs[:, 1] << 4)


def _unpack_int4(packed: Tensor) -> Tensor:
    low = (packed << 4).view(torch.int8) >> 4
    high = packed.view(torch.int8) >> 4
    return torch.stack([low, high], dim=1).reshape(-1)


def _as_bytes(tensor: Tensor) -> memoryview:
    return tensor.contiguous().view(torch.uint8).numpy().data

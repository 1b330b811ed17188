"""Weights of quantized checkpoints, decoded when they are read.

A weight is stored in two tensors, of numbers and of their scales."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from phalanx.spec.errors import UserError

FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Numbers of the codes 0 to 7 of e2m1 (OCP Microscaling Formats, version 1.0, section 5.3.3); 8 to 15 negate them."""
FIX = "use a checkpoint in bf16, fp32, MXFP4, or float8 with scales of blocks"


@dataclass(frozen=True)
class Encoding:
    """How a checkpoint stores its quantized weights."""

    suffixes: tuple[str, str]
    """Ends of the names of numbers and scales, after the name of the weight."""
    decode: Callable[[Tensor, Tensor], Tensor]
    """Function of a matrix's numbers and scales that returns the matrix as the family stores it."""


def find_encoding(config: Mapping[str, Any]) -> Encoding | None:
    """Return the encoding that a config.json names; None if its weights are plain.

    Raises UserError for an encoding that is not supported.
    """
    quantization = config.get("quantization_config")
    if not quantization:
        return None
    field = "config.json quantization_config"
    method = quantization.get("quant_method")
    if method == "mxfp4":
        return Encoding(("_blocks", "_scales"), decode_mxfp4)
    if method != "fp8":
        raise UserError(f"{field}.quant_method", method, "is not supported", FIX)
    block = quantization.get("weight_block_size")
    if not (isinstance(block, list) and len(block) == 2):
        raise UserError(f"{field}.weight_block_size", block, "is not supported", FIX)
    return Encoding(("", "_scale_inv"), partial(decode_fp8, block=(block[0], block[1])))


def stored_weights(encoding: Encoding | None, names: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Return the names of the tensors that store each weight: itself, or numbers and scales."""
    weights: dict[str, tuple[str, ...]] = {name: (name,) for name in names}
    if encoding is None:
        return weights
    numbers, scales = encoding.suffixes
    for name in names:
        weight = name.removesuffix(scales)
        if weight != name and f"{weight}{numbers}" in weights:
            del weights[name], weights[f"{weight}{numbers}"]
            weights[weight] = (f"{weight}{numbers}", name)
    return weights


def decode_mxfp4(numbers_OGB: Tensor, scales_OG: Tensor) -> Tensor:
    """Return the matrix [in, out] of gpt-oss, in bf16, which represents it exactly.

    G groups of 32 inputs have a scale 2**(s - 127); a byte has two numbers, the first in its low half."""
    values = torch.tensor([*FP4_VALUES, *(-value for value in FP4_VALUES)], dtype=torch.bfloat16)
    pairs = torch.stack([values.repeat(16), values.repeat_interleave(16)], dim=1)
    rows_OGI = pairs[numbers_OGB.int()].flatten(-2)
    return rows_OGI.mul_(scales_OG.view(torch.float8_e8m0fnu).bfloat16()[..., None]).flatten(-2).T


def decode_fp8(numbers_OI: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """Return the matrix [out, in] of DeepSeek-V3 in fp32: each block of e4m3 numbers times its scale."""
    rows, columns = block
    out, inputs = numbers_OI.shape
    if scales.shape != (-(-out // rows), -(-inputs // columns)):
        problem = f"differ from the blocks of {rows} x {columns} of a matrix {list(numbers_OI.shape)}"
        raise UserError("model.from_hf", f"scales {list(scales.shape)}", problem, "download it again")
    matrix = numbers_OI.float()
    for part, scale in zip(matrix.split(rows), scales.float(), strict=True):
        part *= scale.repeat_interleave(columns)[:inputs]
    return matrix

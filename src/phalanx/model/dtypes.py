"""The PyTorch dtype of each precision name."""

from __future__ import annotations

import torch
from torch import Tensor

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp8": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
"""Dtypes of activations and of the operands of matrix products. In fp8, the products of blocks cast their operands
further."""


def at_least_fp32(x: Tensor) -> Tensor:
    """Return a tensor in fp32, or in fp64 if it is."""
    return x if x.dtype == torch.float64 else x.float()

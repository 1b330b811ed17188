"""The PyTorch dtype of each precision name."""

from __future__ import annotations

import torch

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}

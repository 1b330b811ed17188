"""Names of precisions and the dtypes of PyTorch."""

from __future__ import annotations

import torch

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}

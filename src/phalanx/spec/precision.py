"""Precisions of training.

A file of its own: the checks of `doctor`, which run in many short processes, need it without pydantic.
"""

from __future__ import annotations

from typing import Literal

Precision = Literal["bf16", "fp8", "fp32", "fp64"]
BF16_PRECISIONS = ("bf16", "fp8")
"""Precisions that compute in bf16 over fp32 parameters. In fp8 the matrix products of blocks have float8 operands."""

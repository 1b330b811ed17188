"""Bytes of a number, in each arithmetic that a run may have."""

from __future__ import annotations

from typing import Literal

Precision = Literal["bf16", "fp32", "fp64"]

COMPUTED: dict[Precision, int] = {"bf16": 2, "fp32": 4, "fp64": 8}
"""What matrix products read and write."""
KEPT: dict[Precision, int] = {"bf16": 4, "fp32": 4, "fp64": 8}
"""What an optimizer trains, its gradients, and its state. bf16 is too coarse for them: its copies that the products
read are made when needed."""

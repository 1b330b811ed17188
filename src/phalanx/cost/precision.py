"""Bytes of a number, in each arithmetic that a run may have."""

from __future__ import annotations

from typing import Literal

import numpy as np

from phalanx.cost.kinds import Column

Precision = Literal["bf16", "fp32", "fp64"]

COMPUTE_BYTES: dict[Precision, int] = {"bf16": 2, "fp32": 4, "fp64": 8}
"""What matrix products read and write."""
STATE_BYTES: dict[Precision, int] = {"bf16": 4, "fp32": 4, "fp64": 8}
"""What an optimizer trains, its gradients, and its state. bf16 is too coarse for them: its copies that the products
read are made when needed."""


def master_weight_bytes(number_bytes: Column) -> Column:
    """`STATE_BYTES`, of many jobs by what they compute with: fp32, unless that is wider. Losses are as exact."""
    return np.maximum(number_bytes, STATE_BYTES["bf16"])

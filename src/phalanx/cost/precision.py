"""Bytes per number for each precision of a run."""

from __future__ import annotations

import numpy as np

from phalanx.cost.kinds import Column
from phalanx.spec.precision import Precision

COMPUTE_BYTES: dict[Precision, int] = {"bf16": 2, "fp8": 2, "fp32": 4, "fp64": 8}
"""Bytes per number of activations and of the weights that matrix products read. In fp8 the products cast them."""
STATE_BYTES: dict[Precision, int] = {"bf16": 4, "fp8": 4, "fp32": 4, "fp64": 8}
"""Bytes per number of master weights, gradients and optimizer state.

These are too sensitive for bf16. The bf16 copies that products read are made when needed.
"""


def master_weight_bytes(number_bytes: Column) -> Column:
    """Return the bytes per number of master weights and losses: fp32, or the compute dtype if wider.

    This is `STATE_BYTES` for many jobs, by the bytes of the numbers that they compute with.
    """
    return np.maximum(number_bytes, STATE_BYTES["bf16"])

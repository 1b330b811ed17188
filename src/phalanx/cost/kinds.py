"""Kinds that a job table encodes as numbers: attention kernel, activation checkpointing, schedule, offload."""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

Column = NDArray[np.float64]


class AttentionKernel(IntEnum):
    """How attention is computed: scores written to memory by separate or by fused kernels, or never written (Flash
    Attention, arXiv 2205.14135; its second version, arXiv 2307.08691; kernels written for newer devices, such as
    cuDNN's and arXiv 2407.08608)."""

    SEPARATE = 0
    FUSED = 1
    FLASH_1 = 2
    FLASH_2 = 3
    FLASH_3 = 4
    RING_PLAIN = 5
    """Around a ring by separate kernels, a causal half of the pairs, and again in the backward pass: nothing kept."""


class ActivationCheckpointing(IntEnum):
    """What the backward pass computes again: nothing; attention's core (arXiv 2205.05198, section 5); norms and
    activations (Megatron-Core's recompute_modules) and, in trainers on FSDP, every other product (torchtitan's
    selective); whole blocks; attention with its projections (Phalanx's own selective)."""

    NONE = 0
    SELECTIVE = 1
    OPERATIONS = 2
    FULL = 3
    ATTENTION = 4


RECOMPUTING_METHODS = (
    ActivationCheckpointing.FULL,
    ActivationCheckpointing.SELECTIVE,
    ActivationCheckpointing.OPERATIONS,
    ActivationCheckpointing.ATTENTION,
)
"""Those that compute something again."""


PHALANX_CHECKPOINTING = {
    "none": ActivationCheckpointing.NONE,
    "selective": ActivationCheckpointing.ATTENTION,
    "full": ActivationCheckpointing.FULL,
}
"""Map `layout.activation_checkpointing` to its method.

Even where flash kernels save no scores, selective drops the saved activations of attention's projections.
"""


class ScheduleKind(IntEnum):
    """Pipeline schedules, as far as their bubbles differ."""

    NONE = 0
    ONE_F_ONE_B = 1
    INTERLEAVED = 2
    ZB_H1 = 3
    ZB_H2 = 4
    ZB_V = 5
    GPIPE = 6


class OffloadTarget(IntEnum):
    """Where what a rank trains rests: on its device; in CPU memory; in files, as far as `parallel.data.offload` puts it
    there."""

    NONE = 0
    CPU = 1
    FILES = 2

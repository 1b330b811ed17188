"""Categories that a job table encodes as numbers.

Attention kernel, activation checkpointing, pipeline schedule and offload target.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from phalanx.spec.layout import CheckpointingName

Column = NDArray[np.float64]


class AttentionKernel(IntEnum):
    """Implementation of attention.

    Separate or fused kernels write the scores to memory. Flash Attention never does (arXiv 2205.14135; its second
    version, arXiv 2307.08691; kernels written for newer devices, such as cuDNN's and arXiv 2407.08608).
    """

    SEPARATE = 0
    FUSED = 1
    FLASH_1 = 2
    FLASH_2 = 3
    FLASH_3 = 4
    RING = 5
    """Ring attention with a kernel of FLASH_2 for each step, whose result is merged with those of earlier steps."""


class ActivationCheckpointing(IntEnum):
    """Operations that the backward pass recomputes.

    - NONE: nothing.
    - SELECTIVE: attention's core (arXiv 2205.05198, section 5).
    - OPERATIONS: norms and activations (Megatron-Core's recompute_modules); with FSDP, also every other product
    (torchtitan's selective).
    - FULL: full blocks.
    - ATTENTION: attention with its projections (Phalanx's own selective).
    - OFFLOAD: full blocks, whose inputs are in CPU memory between the passes.
    - NORMS: outputs of the norms of the residual stream.
    """

    NONE = 0
    SELECTIVE = 1
    OPERATIONS = 2
    FULL = 3
    ATTENTION = 4
    OFFLOAD = 5
    NORMS = 6


PHALANX_CHECKPOINTING: dict[CheckpointingName, ActivationCheckpointing] = {
    "none": ActivationCheckpointing.NONE,
    "norms": ActivationCheckpointing.NORMS,
    "selective": ActivationCheckpointing.ATTENTION,
    "full": ActivationCheckpointing.FULL,
    "offload": ActivationCheckpointing.OFFLOAD,
}
"""Map from `layout.activation_checkpointing` to its method.

Selective checkpointing drops the activations of attention's projections, even if flash kernels save no scores.
"""


class ScheduleKind(IntEnum):
    """Pipeline schedules with different bubbles."""

    NONE = 0
    ONE_F_ONE_B = 1
    INTERLEAVED = 2
    ZB_H1 = 3
    ZB_H2 = 4
    ZB_V = 5
    GPIPE = 6


class OffloadTarget(IntEnum):
    """Storage of the training state of a rank.

    NONE is its device, CPU is CPU memory, and FILES is files for the part that `parallel.data.offload` stores there.
    """

    NONE = 0
    CPU = 1
    FILES = 2

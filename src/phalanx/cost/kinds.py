"""Choices of a job as numbers, since a job table is columns of numbers."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from phalanx.spec.layout import CheckpointingName, OffloadName
from phalanx.spec.pipeline_schedules import ScheduleName

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


Recomputation = Literal[CheckpointingName, "attention core", "operations"]
"""Operations that the backward pass recomputes: those of `layout.activation_checkpointing`, or of other trainers.

- none: nothing.
- norms: outputs of the norms of the residual stream.
- selective: attention with its projections, even if flash kernels save no scores.
- full: full blocks.
- offload: full blocks, whose inputs are in CPU memory between the passes.
- attention core: attention without its projections, Megatron-LM's selective (arXiv 2205.05198, section 5).
- operations: norms and activations (Megatron-Core's recompute_modules); with FSDP, also every other product
(torchtitan's selective).
"""
if TYPE_CHECKING:
    Schedule: TypeAlias = str
else:
    Schedule = Literal["none", ScheduleName]
"""Schedule of a pipeline; none without a pipeline."""
Trainer = Literal["Phalanx", "Megatron-LM", "DeepSpeed", "FSDP", "nanotron"]
Choice = Recomputation | Schedule | OffloadName | Trainer

CODES: dict[Choice, int] = {
    name: code
    for code, name in enumerate(
        dict.fromkeys(name for choice in (Recomputation, Schedule, OffloadName, Trainer) for name in get_args(choice))
    )
}
"""Number of each choice in a column; 0 is "none"."""


def select_choice(column: Column, values: Mapping[Choice, Column], default: Column | float) -> Column:
    """Return the value of each row's choice."""
    return np.select([column == CODES[choice] for choice in values], list(values.values()), default)

"""Communication buffers of a rank at one time of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Moment = Literal[
    "backward_start",
    "in_loss",
    "in_head",
    "inside_block",
    "inside_mlp",
    "after_experts",
    "in_dispatch",
    "inside_attention",
    "after_block",
    "in_update",
]
"""Time at the start of the backward pass, in that of a block, or in the update. The start is the loss, and the head's
backward pass. Experts can be a unit of FSDP that is complete before their block, and before the dispatch of their
rows."""


@dataclass(frozen=True, kw_only=True)
class CommBufferPeak:
    """Communication buffers at a time of a step's last micro-batch."""

    backward_fraction: float
    """Completed fraction of the blocks' backward pass: 0 until the end of the first block, 1 at the end and at the
    update. In a pipeline only `backward_start` matters: other peaks are at the end of a step."""
    gradient_fraction: float | None = None
    """Fraction of the gradients that exist by then, if it differs: those of a head precede all blocks."""
    bytes: int
    moment: Moment
    weight_gradient_bytes: int = 0
    """Bytes of the gradient of each weight of the block that exists inside it, and is in no other number."""
    kept_gradients: float = 1.0
    """Fraction of these gradients that has not been dropped: less in the update, and 0 in the next forward pass."""
    gather_stream_bytes: int = 0
    """Part of `bytes` on the gather stream, whose memory CUDA's allocator keeps separate."""

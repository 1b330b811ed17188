"""Communication buffers of a rank at one time of a step."""

from __future__ import annotations

from dataclasses import dataclass

FIRST_BLOCK = 1e-9
"""Fraction of the backward pass that is complete at the start of the first block, after the loss and the head."""


@dataclass(frozen=True, kw_only=True)
class CommBufferPeak:
    """Communication buffers at a time of a step's last micro-batch."""

    backward_fraction: float
    """Completed fraction of the blocks' backward pass: 0 at its start, 1 at its end and at the update."""
    gradient_fraction: float | None = None
    """Fraction of the gradients that exist by then, if it differs: those of a head precede all blocks."""
    bytes: int
    is_between_blocks: bool = False
    """True between blocks, when the inner gradients of a block have been freed."""
    gather_stream_bytes: int = 0
    """Part of `bytes` on the gather stream, whose memory CUDA's allocator keeps separate."""

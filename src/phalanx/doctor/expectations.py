"""What a run asks of each of its nodes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Expectations:
    """What is not known is None, and is not judged."""

    directory: str = "."
    """Where runs are written; it need not be there yet."""
    quick: bool = False
    """Whether all must be done within a minute."""
    nccl_log: str | None = None
    """A log of NCCL (NCCL_DEBUG=INFO)."""
    nodes: int | None = None
    gpus: int | None = None
    """Of a node; 0 where the run is for CPUs."""
    ranks: int | None = None
    """Of a node."""
    rank_bytes: int | None = None
    """Memory that the fullest rank needs."""
    checkpoints: str | None = None
    """The directory of the run's."""
    checkpoints_bytes: int | None = None
    """All that are kept at once, and one more."""
    checkpoint_bytes: int = 0
    """One of them."""
    precision: str | None = None
    """In which it computes: "bf16", "fp32", ..."""
    network_bytes_per_second: float | None = None
    """A device's share of its node's network cards."""

"""What a run asks of each of its nodes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Expected:
    """What is not known is None, and is not judged."""

    directory: str = "."
    """Where runs are written."""
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
    checkpoints_bytes: int | None = None
    """Those that are kept at once, without those that are there."""
    network_bytes_per_second: float | None = None
    """A device's share of its node's network cards."""

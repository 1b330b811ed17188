"""Requirements of a run for each of its nodes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Expectations:
    """Requirements of a run. Unknown ones are None, and are not checked."""

    directory: str = "."
    """The output directory of runs, which may not exist yet."""
    quick: bool = False
    """True if all checks must finish within a minute."""
    nccl_log: str | None = None
    """A log of NCCL (NCCL_DEBUG=INFO)."""
    nodes: int | None = None
    gpus: int | None = None
    """Number of GPUs per node; 0 for a run on CPUs."""
    ranks: int | None = None
    """Number of ranks per node."""
    rank_bytes: int | None = None
    """Memory of the rank that needs most."""
    checkpoints: str | None = None
    """The directory of the run's checkpoints."""
    checkpoints_bytes: int | None = None
    """Size of all checkpoints that are kept at once, and one more."""
    checkpoint_bytes: int = 0
    """Size of one checkpoint."""
    precision: str | None = None
    """Precision of the run: "bf16", "fp32", ..."""
    network_bytes_per_second: float | None = None
    """A device's share of the bandwidth of its node's network cards."""

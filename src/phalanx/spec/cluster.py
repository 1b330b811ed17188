"""The machines of a run."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from phalanx.spec.base import Spec


class Cluster(Spec):
    """Nodes, the devices in them, and what they can do. Unknown speeds are measured or left out, never guessed."""

    preset: str | None = Field(None, examples=["h100"])
    """A known machine whose values the other fields override: a100, h100, h200."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """What computes: auto takes the GPU that is there, else the CPU."""
    nodes: int = Field(1, gt=0)
    """Machines of the run, each with as many ranks; more than one are started with torchrun."""
    nproc: int | None = Field(None, gt=0, examples=[2])
    """Ranks per node; by default one per GPU, and on a CPU one. `--nproc` overrides it."""
    peak_flops: float | None = Field(None, gt=0, examples=[1e12])
    """Peak dense matrix-product speed of one rank's device in FLOP/s at the training precision, for MFU. By default the
    preset's, or on a CPU what a short matrix product reaches at start-up."""
    memory_bytes: int | None = Field(None, gt=0, examples=[16_000_000_000])
    """Memory of one device."""

    @property
    def ranks(self) -> int:
        """Ranks of all nodes, of which each has one where `nproc` is not set."""
        return (self.nproc or 1) * self.nodes

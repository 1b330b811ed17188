"""How the work is laid over ranks: the parallel degrees and choices, and their arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from phalanx.spec.base import Spec, divisors
from phalanx.spec.errors import UserError

RUNNABLE_DATA = ("ddp", "zero3", "hsdp")
NOT_YET = "is described, but does not run yet"


class Layout(Spec):
    """The parallel degrees and choices of a run.

    The data-parallel degree is what the other degrees leave of the ranks.
    """

    data: Literal["ddp", "zero1", "zero2", "zero3", "hsdp", "parameter_server"] = "ddp"
    """How data-parallel ranks share model state: replicated (ddp), sharded (zero1 to zero3 = FSDP), or sharded
    within groups and replicated between them (hsdp)."""
    dp_shard: int | None = Field(None, gt=0, examples=[8])
    """Ranks that share one sharded copy (hsdp). Must divide the data-parallel degree."""
    tp: int = Field(1, gt=0)
    """Tensor-parallel degree."""
    pp: int = Field(1, gt=0)
    """Pipeline stages in sequence."""
    cp: int = Field(1, gt=0)
    """Context-parallel degree."""
    ep: int = Field(1, gt=0)
    """Expert-parallel degree."""
    schedule: Literal["naive", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipe-v"] = "1f1b"
    """Pipeline schedule."""
    virtual_stages: int = Field(1, gt=0)
    """Pipeline stages on each rank (interleaved)."""
    micro_batch: int | None = Field(None, gt=0, examples=[4])
    """Sequences per rank in one forward pass. By default the largest that divides the rank's share of a step and
    holds at most 16,384 tokens and 2 GiB of logits (fp32, tokens x vocabulary)."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations computed again in the backward pass: none; attention only (selective); whole blocks (full)."""
    offload: Literal["none", "cpu", "nvme"] = "none"
    """Where parameters and optimizer state rest between uses."""
    bucket_mb: float = Field(25.0, gt=0)
    """Gradient bucket of DDP, in MiB; other ways of `data` have none."""
    static_graph: bool = False
    """Tell DDP that every step uses the same parameters; not with accumulation."""


@dataclass(frozen=True)
class Degrees:
    """The size of every mesh axis; their product is the world size. Outermost first: pipeline neighbours may be far
    apart, tensor-parallel ranks sit next to each other."""

    pp: int
    """Pipeline stages."""
    dp_replicate: int
    """Copies of the model (its shards together count as one)."""
    dp_shard: int
    """Ranks that share one sharded copy."""
    cp: int
    """Ranks that share one sequence."""
    tp: int
    """Ranks that share one matrix product."""

    @property
    def dp(self) -> int:
        """Ranks that read different data."""
        return self.dp_replicate * self.dp_shard

    @property
    def world_size(self) -> int:
        """All ranks of the run."""
        return self.pp * self.dp * self.cp * self.tp


def degrees(layout: Layout, world_size: int) -> Degrees:
    """The mesh axes of `layout` on `world_size` ranks.

    Raises UserError if the ranks cannot be divided so.
    """
    model_ranks = layout.pp * layout.cp * layout.tp
    if world_size % model_ranks:
        raise UserError(
            "parallel.pp x cp x tp", model_ranks, f"does not divide the {world_size} ranks of the run",
            f"use a multiple of {model_ranks} ranks, or lower a degree",
        )  # fmt: skip
    dp = world_size // model_ranks
    if layout.dp_shard is not None and layout.data != "hsdp":
        raise UserError(
            "parallel.dp_shard", layout.dp_shard, f'has no meaning with parallel.data = "{layout.data}"',
            'remove it, or set parallel.data = "hsdp"',
        )  # fmt: skip
    if layout.data == "hsdp":
        allowed = ", ".join(map(str, divisors(dp)))
        if layout.dp_shard is None:
            raise UserError("parallel.dp_shard", None, 'is needed with parallel.data = "hsdp"', f"use one of {allowed}")
        if dp % layout.dp_shard:
            problem = f"does not divide the {dp} data-parallel ranks"
            raise UserError("parallel.dp_shard", layout.dp_shard, problem, f"use one of {allowed}")
    shard = {"ddp": 1, "parameter_server": 1, "hsdp": layout.dp_shard or 1}.get(layout.data, dp)
    return Degrees(layout.pp, dp // shard, shard, layout.cp, layout.tp)


def refuse_unrunnable(layout: Layout) -> None:
    """Raise UserError for a value that training cannot run yet, or that means nothing in this layout."""
    if layout.data not in RUNNABLE_DATA:
        raise UserError("parallel.data", layout.data, NOT_YET, f"runs today: {', '.join(RUNNABLE_DATA)}")
    for axis in ("tp", "pp", "cp", "ep", "virtual_stages"):
        if getattr(layout, axis) != 1:
            raise UserError(f"parallel.{axis}", getattr(layout, axis), NOT_YET, f"set parallel.{axis} = 1")
    for field, runs in (("schedule", "1f1b"), ("offload", "none")):
        if getattr(layout, field) != runs:
            raise UserError(f"parallel.{field}", getattr(layout, field), NOT_YET, f'set parallel.{field} = "{runs}"')
    if layout.static_graph and layout.data != "ddp":
        raise UserError(
            "parallel.static_graph", True, f'has no meaning with parallel.data = "{layout.data}"',
            'remove it, or set parallel.data = "ddp"',
        )  # fmt: skip

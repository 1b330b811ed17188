"""Parallel degrees of a layout, and the process groups that follow from them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from math import prod

from phalanx.spec.base import divisors
from phalanx.spec.errors import UserError
from phalanx.spec.layout import Layout, check_inapplicable_options


@dataclass(frozen=True)
class ParallelDims:
    """The size of every mesh axis; their product is the world size. Tensor-parallel ranks, which meet in every layer,
    sit next to each other; data-parallel ranks, which meet once per step, or pipelines, may be far apart."""

    dp_replicate: int
    """Copies of the model (its shards together count as one)."""
    dp_shard: int
    """Ranks that share one sharded copy."""
    pp: int
    """Ranks that a batch passes one after another."""
    cp: int
    """Ranks that share one sequence."""
    tp: int
    """Ranks that share one matrix product."""
    servers: int = 0
    """Ranks that own parameters and compute nothing; they come first."""
    ep: int = 1
    """Of the ranks of a stage, those that have different experts; no axis of its own."""
    pipeline_outermost: bool = False
    """Whether a pipeline's stages are furthest apart, and not data-parallel ranks."""

    @property
    def axes(self) -> tuple[str, ...]:
        """Outermost first."""
        return ("pp", "dp_replicate", "dp_shard", "cp", "tp") if self.pipeline_outermost else AXES

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where a rank is on every axis; a server is at none, but is given one."""
        coordinates = {}
        remaining = rank - self.servers
        for axis in reversed(self.axes):
            remaining, coordinates[axis] = divmod(remaining, getattr(self, axis))
        return coordinates

    def expert_rank(self, rank: int) -> int:
        """Which of `ep` runs of a layer's experts a rank has."""
        index = 0
        coordinates = self.coordinates(rank)
        for axis in STAGE_AXES:
            index = index * getattr(self, axis) + coordinates[axis]
        return index % self.ep

    @property
    def dp_size(self) -> int:
        """Ranks that read different data."""
        return self.dp_replicate * self.dp_shard

    def with_cp_as_data_parallel(self, sharded: bool) -> ParallelDims:
        """The same, with context parallelism as what it is to whoever keeps or sums what is trained: more ranks with
        the same model and other data; they share one copy where copies are `sharded`."""
        replicate, shard = (1, self.cp) if sharded else (self.cp, 1)
        return replace(self, cp=1, dp_replicate=self.dp_replicate * replicate, dp_shard=self.dp_shard * shard)

    @property
    def world_size(self) -> int:
        """All ranks of the run."""
        return self.servers + self.pp * self.dp_size * self.cp * self.tp


def parallel_dims(layout: Layout, world_size: int) -> ParallelDims:
    """The mesh axes of `layout` on `world_size` ranks.

    Raises UserError if the ranks cannot be divided so, or for a choice that means nothing in this layout.
    """
    check_inapplicable_options(layout)
    servers = layout.num_servers if layout.data_parallel == "parameter_server" else 0
    if servers and servers >= world_size:
        raise UserError(
            "layout.num_servers",
            servers,
            f"leaves no worker of the {world_size} ranks of the run",
            fix=f"start more ranks, or lower it to {world_size - 1}" if world_size > 1 else "start more ranks",
        )
    model_ranks = layout.pp * layout.cp * layout.tp
    if (world_size - servers) % model_ranks:
        used_axes = " x ".join(axis for axis in ("pp", "cp", "tp") if getattr(layout, axis) > 1)
        raise UserError(
            f"layout.{used_axes}",
            model_ranks,
            f"does not divide the ranks that compute ({world_size - servers})",
            fix=f"use a multiple of {model_ranks} ranks, or lower a degree",
        )
    dp = (world_size - servers) // model_ranks
    if layout.data_parallel == "hsdp":
        allowed = ", ".join(map(str, divisors(dp)))
        if layout.dp_shard is None:
            raise UserError(
                "layout.dp_shard", None, 'is needed with layout.data_parallel = "hsdp"', fix=f"use one of {allowed}"
            )
        if dp % layout.dp_shard:
            problem = f"does not divide the {dp} data-parallel ranks"
            raise UserError("layout.dp_shard", layout.dp_shard, problem, fix=f"use one of {allowed}")
        if layout.dp_shard == 1 and layout.offload != "none":
            fix = f'use another of {allowed}, or layout.data_parallel = "zero1"'
            raise UserError("layout.dp_shard", 1, "shards nothing, and only what is sharded is offloaded", fix=fix)
    expert_ranks = dp * layout.cp * layout.tp
    num_copies = dp // (layout.dp_shard or 1) if layout.data_parallel == "hsdp" else 1
    if expert_ranks // num_copies % layout.ep:
        allowed = ", ".join(map(str, divisors(expert_ranks // num_copies)))
        problem = f"does not divide the {expert_ranks // num_copies} ranks that share a copy of a stage's experts"
        raise UserError("layout.ep", layout.ep, problem, fix=f"use one of {allowed}")
    dp_shard = {"ddp": 1, "parameter_server": 1, "hsdp": layout.dp_shard or 1}.get(layout.data_parallel, dp)
    pipeline_outermost = layout.rank_order == "pipeline_outer"
    return ParallelDims(
        dp // dp_shard,
        dp_shard,
        layout.pp,
        cp=layout.cp,
        tp=layout.tp,
        servers=servers,
        ep=layout.ep,
        pipeline_outermost=pipeline_outermost,
    )


AXES = ("dp_replicate", "dp_shard", "pp", "cp", "tp")
"""By default from outside to inside (`ParallelDims.axes`)."""


STAGE_AXES = ("dp_replicate", "dp_shard", "cp", "tp")
"""Of the ranks of a stage."""


MODEL_PARALLEL_AXES = ("pp", "tp", "cp", "ep")
"""Degrees of ranks that share a model or a sequence."""


def uses_model_parallelism(layout: Layout) -> bool:
    """Whether ranks share a model or a sequence."""
    return any(getattr(layout, axis) > 1 for axis in MODEL_PARALLEL_AXES)


def process_groups(dims: ParallelDims, *axes: str) -> list[tuple[int, ...]]:
    """The ranks of every group over these axes: those that differ in nothing else. Servers are in none."""
    sizes = [getattr(dims, axis) for axis in dims.axes]
    strides = [prod(sizes[index + 1 :]) for index in range(len(sizes))]

    def offsets(of_group: bool) -> list[int]:
        steps = [
            range(0, size * stride, stride)
            for axis, size, stride in zip(dims.axes, sizes, strides, strict=True)
            if (axis in axes) == of_group
        ]
        return [sum(coordinates) for coordinates in product(*steps)]

    members = offsets(True)
    return [tuple(dims.servers + first + offset for offset in members) for first in offsets(False)]


def pipeline_stage_groups(dims: ParallelDims) -> list[tuple[int, ...]]:
    """The ranks at every place of the pipeline."""
    return process_groups(dims, *STAGE_AXES)


def expert_parallel_groups(dims: ParallelDims) -> list[tuple[int, ...]]:
    """The ranks of every group that have different experts: neighbours among those of a stage."""
    if dims.ep == 1:
        return []
    return [
        ranks[start : start + dims.ep]
        for ranks in pipeline_stage_groups(dims)
        for start in range(0, len(ranks), dims.ep)
    ]

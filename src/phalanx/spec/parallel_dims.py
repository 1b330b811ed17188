"""Parallel degrees of a layout, and the resulting process groups.

Why: `docs/design/decisions/rank-order.md`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import prod

from phalanx.spec.base import divisors
from phalanx.spec.errors import UserError
from phalanx.spec.layout import FSDP_STRATEGIES, SHARDED_STRATEGIES, Layout, StrategyName, check_inapplicable_options
from phalanx.spec.precision import BF16_PRECISIONS, Precision


@dataclass(frozen=True, kw_only=True)
class ParallelDims:
    """The size of every mesh axis; their product is the world size.

    Tensor-parallel ranks, which communicate in every layer, are adjacent. Data-parallel ranks, which communicate once
    per step, or pipelines, may be far apart.
    """

    dp_replicate: int = 1
    """Copies of the model (all its shards count as one)."""
    dp_shard: int = 1
    """Ranks that share one sharded copy."""
    pp: int = 1
    """Pipeline stages."""
    cp: int = 1
    """Ranks that share one sequence."""
    tp: int = 1
    """Ranks that share one matrix product."""
    servers: int = 0
    """Ranks that own parameters and do not compute; they are the first ranks."""
    ep: int = 1
    """Ranks of a stage that have different experts; not a separate axis."""
    pipeline_outermost: bool = False
    """True if the stages of a pipeline are furthest apart, instead of data-parallel ranks."""

    @property
    def axes(self) -> tuple[str, ...]:
        """Mesh axes, outermost first."""
        return ("pp", "dp_replicate", "dp_shard", "cp", "tp") if self.pipeline_outermost else AXES

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the index of a rank on every axis. A server is on no axis, but has numbers too."""
        coordinates = {}
        remaining = rank - self.servers
        for axis in reversed(self.axes):
            remaining, coordinates[axis] = divmod(remaining, getattr(self, axis))
        return coordinates

    def expert_rank(self, rank: int) -> int:
        """Return which of the `ep` ranges of a layer's experts a rank has."""
        index = 0
        coordinates = self.coordinates(rank)
        for axis in STAGE_AXES:
            index = index * getattr(self, axis) + coordinates[axis]
        return index % self.ep

    @property
    def dp_size(self) -> int:
        """Number of ranks that read different data."""
        return self.dp_replicate * self.dp_shard

    @property
    def expert_dp_size(self) -> int:
        """Number of ranks of a stage that have the same experts."""
        return self.dp_size * self.cp * self.tp // self.ep

    def with_cp_as_data_parallel(self, layout: Layout) -> ParallelDims:
        """Return these dimensions with context-parallel ranks counted as data-parallel.

        For storing and reducing model state, context-parallel ranks are further ranks with the same model and other
        data. They share one copy of the state if the strategy of the layout shards copies.
        """
        replicate, shard = (1, self.cp) if layout.data_parallel in SHARDED_STRATEGIES else (self.cp, 1)
        return replace(self, cp=1, dp_replicate=self.dp_replicate * replicate, dp_shard=self.dp_shard * shard)

    @property
    def world_size(self) -> int:
        """Number of ranks of the run."""
        return self.servers + self.pp * self.dp_size * self.cp * self.tp


def parallel_dims(layout: Layout, world_size: int) -> ParallelDims:
    """Return the mesh axes of `layout` on `world_size` ranks.

    Raises UserError if the ranks cannot be divided in this way, or an option does not apply to this layout.
    """
    check_inapplicable_options(layout)
    servers = layout.num_servers if layout.data_parallel == "parameter_server" else 0
    if servers and servers >= world_size:
        fix = f"start more ranks, or use at most {world_size - 1}" if world_size > 1 else "start more ranks"
        raise UserError("layout.num_servers", servers, f"leaves no worker among the {world_size} ranks of the run", fix)
    model_ranks = layout.pp * layout.cp * layout.tp
    if (world_size - servers) % model_ranks:
        used_axes = " x ".join(axis for axis in ("pp", "cp", "tp") if getattr(layout, axis) > 1)
        problem = f"does not divide the {world_size - servers} ranks that compute"
        fix = f"use a multiple of {model_ranks} ranks (such as --nproc {model_ranks}), or lower a degree"
        raise UserError(f"layout.{used_axes}", model_ranks, problem, fix)
    dp = (world_size - servers) // model_ranks
    if layout.data_parallel == "hsdp":
        allowed = ", ".join(map(str, divisors(dp)))
        if layout.dp_shard is None:
            problem = 'is required with layout.data_parallel = "hsdp"'
            raise UserError("layout.dp_shard", None, problem, f"use one of {allowed}")
        if dp % layout.dp_shard:
            problem = f"does not divide the {dp} data-parallel ranks"
            raise UserError("layout.dp_shard", layout.dp_shard, problem, f"use one of {allowed}")
        if layout.dp_shard == 1 and layout.offload != "none":
            fix = f'use another value of {allowed}, or layout.data_parallel = "zero1"'
            problem = f'cannot be combined with layout.offload = "{layout.offload}", which requires sharded state'
            raise UserError("layout.dp_shard", 1, problem, fix)
    expert_ranks = dp * layout.cp * layout.tp
    num_copies = dp // (layout.dp_shard or 1) if layout.data_parallel == "hsdp" else 1
    if expert_ranks // num_copies % layout.ep:
        allowed = ", ".join(map(str, divisors(expert_ranks // num_copies)))
        problem = f"does not divide the {expert_ranks // num_copies} ranks that store one copy of a stage's experts"
        raise UserError("layout.ep", layout.ep, problem, f"use one of {allowed}")
    dp_shard = {"ddp": 1, "parameter_server": 1, "hsdp": layout.dp_shard or 1}.get(layout.data_parallel, dp)
    pipeline_outermost = layout.rank_order == "pipeline_outer"
    return ParallelDims(
        dp_replicate=dp // dp_shard,
        dp_shard=dp_shard,
        pp=layout.pp,
        cp=layout.cp,
        tp=layout.tp,
        servers=servers,
        ep=layout.ep,
        pipeline_outermost=pipeline_outermost,
    )


def strategy_on_ranks(layout: Layout, shards: int) -> StrategyName:
    """Return the strategy that a layout has on its ranks.

    FSDP on one shard is a replica, or ZeRO-2 if it offloads. In a pipeline, ZeRO-2 keeps full gradients, as ZeRO-1
    does. `shards` includes the ranks of context parallelism.
    """
    strategy = layout.data_parallel
    if strategy in FSDP_STRATEGIES and shards == 1:
        strategy = "ddp" if layout.offload == "none" else "zero2"
    return "zero1" if layout.pp > 1 and strategy == "zero2" else strategy


def replica_strategy(strategy: StrategyName, precision: Precision, summed_gradients: int) -> StrategyName:
    """Return the strategy with which the replicas of a transformer compute.

    In bf16 a single replica is ZeRO-1 on one rank: it computes with bf16 parameters and trains an fp32 copy.
    `summed_gradients` is the product of the ranks of data, context and expert parallelism: with the last, one replica
    may have several copies of its experts, and adds their gradients. Only "ddp" has replicas.
    """
    is_alone = strategy == "ddp" and summed_gradients == 1
    return "zero1" if is_alone and precision in BF16_PRECISIONS else strategy


AXES = ("dp_replicate", "dp_shard", "pp", "cp", "tp")
"""Default order of the axes, outermost first (`ParallelDims.axes`)."""
STAGE_AXES = ("dp_replicate", "dp_shard", "cp", "tp")
"""Axes of the ranks of a stage."""
MODEL_PARALLEL_AXES = ("pp", "tp", "cp", "ep")
"""Degrees of ranks that share a model or a sequence."""


def uses_model_parallelism(layout: Layout) -> bool:
    """Return whether ranks share a model or a sequence."""
    return any(getattr(layout, axis) > 1 for axis in MODEL_PARALLEL_AXES)


def transformer_only_options(layout: Layout) -> Iterator[tuple[str, object, object]]:
    """Yield the name, value and default of each changed option that only Phalanx's transformer supports."""
    for field in (*MODEL_PARALLEL_AXES, "activation_checkpointing"):
        is_auto = field == "activation_checkpointing" and layout.auto_checkpointing
        value = "auto" if is_auto else getattr(layout, field)
        default = Layout.model_fields[field].default
        if value != default:
            yield field, value, default


def process_groups(dims: ParallelDims, *axes: str) -> list[tuple[int, ...]]:
    """Return the ranks of every group over these axes.

    The ranks of a group differ in these axes only. Servers are in none.
    """
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
    """Return the ranks at every index of the pipeline."""
    return process_groups(dims, *STAGE_AXES)


def expert_parallel_groups(dims: ParallelDims) -> list[tuple[int, ...]]:
    """Return the ranks of every expert-parallel group: neighbors within a stage."""
    if dims.ep == 1:
        return []
    return [
        ranks[start : start + dims.ep]
        for ranks in pipeline_stage_groups(dims)
        for start in range(0, len(ranks), dims.ep)
    ]

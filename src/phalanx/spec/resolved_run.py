"""A run on a number of ranks, and what follows from both."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from phalanx.spec.batch import BatchPlan, plan_batch
from phalanx.spec.layout import Layout, StrategyName
from phalanx.spec.parallel_dims import ParallelDims, parallel_dims, replica_strategy, strategy_on_ranks
from phalanx.spec.run import RunSpec


@dataclass(frozen=True)
class ResolvedRun:
    """A run on `world_size` ranks.

    Each property is computed at its first use, and raises UserError if the ranks cannot be divided like this.
    """

    run: RunSpec
    world_size: int

    @classmethod
    def on_cluster(cls, run: RunSpec) -> ResolvedRun:
        """Return the run on all ranks of its cluster."""
        return cls(run, run.cluster.ranks)

    @property
    def layout(self) -> Layout:
        """The layout of the run."""
        return self.run.layout

    def with_layout(self, layout: Layout) -> ResolvedRun:
        """Return the run with another layout on these ranks, without checking its fields again."""
        return ResolvedRun(self.run.model_copy(update={"layout": layout}), self.world_size)

    @cached_property
    def dims(self) -> ParallelDims:
        """The size of every mesh axis."""
        return parallel_dims(self.layout, self.world_size)

    @cached_property
    def data_dims(self) -> ParallelDims:
        """`dims` with context-parallel ranks counted as data-parallel."""
        return self.dims.with_cp_as_data_parallel(self.layout)

    @cached_property
    def batch(self) -> BatchPlan:
        """The division of a step's tokens among the ranks."""
        return plan_batch(self.run, self.dims.dp_size)

    @property
    def micro_batches(self) -> int:
        """Micro-batches per step."""
        return self.batch.gradient_accumulation_steps

    @cached_property
    def strategy(self) -> StrategyName:
        """The data-parallel strategy with which the ranks compute.

        Networks of the user compute with autocast in a single replica.
        """
        strategy = strategy_on_ranks(self.layout, self.data_dims.dp_shard)
        if self.run.model.implementation is not None:
            return strategy
        return replica_strategy(strategy, self.run.training.precision, self.data_dims.dp_size * self.layout.ep)

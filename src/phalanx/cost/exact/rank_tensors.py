"""What each rank of a pipeline has of a model in stages and shares: shapes by name, and among how many ranks data
parallelism may split them further."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial

from phalanx.cost.exact.parameter_shapes import Shape, Shapes, parameter_shapes, strip_block_index
from phalanx.cost.exact.pipeline_split import layers_per_stage
from phalanx.schedule.registry import representative_schedule
from phalanx.spec.layout import SHARDED_STRATEGIES, Layout
from phalanx.spec.parallel_dims import parallel_dims
from phalanx.spec.run import RunSpec
from phalanx.spec.tensor_sharding import TensorSharding, rows_on_rank, tensor_sharding


@dataclass(frozen=True)
class RankTensors:
    """The tensors of a rank."""

    dense: Shapes
    """All but experts that are apart, of which each data-parallel rank has a copy, or some rows."""
    shards: int
    """Ranks that have rows of these."""
    expert: Shapes
    """Experts, where ranks have different ones."""
    expert_shards: int
    """Ranks that have rows of these."""
    names: tuple[str, ...]
    """Of all of them, in the model's order."""
    tied_embedding_copy: Shape | None = None
    """Of a tied embedding, which another rank trains."""

    @property
    def all(self) -> Shapes:
        """Dense ones and those apart, in a model's order."""
        shapes = self.dense | self.expert
        return {name: shapes[name] for name in self.names}

    @property
    def signature(self) -> tuple[object, ...]:
        """The same for ranks of one model and layout that differ in nothing but the blocks' numbers."""
        return (
            tuple(map(strip_block_index, self.dense)),
            tuple(map(strip_block_index, self.expert)),
            self.tied_embedding_copy,
        )


def rank_tensors(run: RunSpec, world_size: int, tp_rank: int = 0) -> list[RankTensors]:
    """Of a rank at each place of the pipeline (one, without a pipeline): by default of the one with the largest shares,
    else of the one that has this place among those that share products.

    Raises UserError if the ranks cannot be divided so.
    """
    spec = run.model
    layout = run.layout
    dims = parallel_dims(layout, world_size)
    data_dims = dims.with_cp_as_data_parallel(sharded=layout.data_parallel in SHARDED_STRATEGIES)
    num_copies = dims.dp_replicate if layout.data_parallel == "hsdp" else 1
    expert_replicas = dims.dp_size * dims.cp * dims.tp // dims.ep // num_copies
    full_shapes = parameter_shapes(spec)
    sharding_of = cache(partial(tensor_sharding, spec, layout))
    shardings = {name: sharding_of(strip_block_index(name)) for name in full_shapes}
    shapes = {
        name: _local_shape(layout, sharding, full_shapes[name], tp_rank=tp_rank) for name, sharding in shardings.items()
    }
    expert_names = {name for name, sharding in shardings.items() if sharding.mesh_axis == "ep"}
    expert_shards = expert_replicas if layout.data_parallel in SHARDED_STRATEGIES else 1
    return [
        RankTensors(
            {name: shapes[name] for name in names if name not in expert_names},
            data_dims.dp_shard,
            {name: shapes[name] for name in names if name in expert_names},
            expert_shards=expert_shards,
            names=tuple(names),
            tied_embedding_copy=shapes["embedding.weight"] if has_copy else None,
        )
        for names, has_copy in _stage_tensor_names(run, list(shapes))
    ]


def _local_shape(layout: Layout, sharding: TensorSharding, shape: Shape, tp_rank: int) -> Shape:
    """Of one of the ranks that share a tensor; of those that share experts all have as many."""
    if sharding.dim is None:
        return shape
    num_shards, index = (
        (layout.tp // sharding.replication, tp_rank // sharding.replication)
        if sharding.mesh_axis == "tp"
        else (layout.ep, 0)
    )
    return tuple(
        rows_on_rank(index, size, num_shards) if axis == sharding.dim else size for axis, size in enumerate(shape)
    )


def _stage_tensor_names(run: RunSpec, names: list[str]) -> list[tuple[list[str], bool]]:
    """The tensors of each place of the pipeline, and whether it has a copy of a tied embedding beside."""
    if run.layout.pp == 1:
        return [(names, False)]
    schedule = representative_schedule(run.layout)
    layers = layers_per_stage(run)
    first, last = schedule.end_ranks
    end_rank_of_part = {"embedding": first, "positions": first, "norm": last, "head": last}
    rank_of = {str(layer): schedule.rank_of[stage] for stage, members in enumerate(layers) for layer in members}

    def owner_rank(name: str) -> int:
        part, layer, *_ = name.split(".")
        return rank_of[layer] if part == "blocks" else end_rank_of_part[part]

    names_by_rank: list[list[str]] = [[] for _ in range(run.layout.pp)]
    for name in names:
        names_by_rank[owner_rank(name)].append(name)
    return [(members, run.model.tie_embeddings and rank == last != first) for rank, members in enumerate(names_by_rank)]

"""Tensors of each pipeline rank under its layout, by name and shape, and their data-parallel shards."""

from __future__ import annotations

from dataclasses import dataclass, field

from phalanx.program.pipeline_split import layers_per_stage
from phalanx.schedule.registry import representative_schedule
from phalanx.spec.layout import SHARDED_STRATEGIES, Layout
from phalanx.spec.parameter_shapes import Shapes, num_elements, strip_block_index
from phalanx.spec.parts.model import carried_tensors, model_parameters, num_forward_only_blocks
from phalanx.spec.parts.operations import NF4_BLOCK, NF4_BLOCK_BYTES, Shape
from phalanx.spec.resolved_run import ResolvedRun
from phalanx.spec.run import RunSpec
from phalanx.spec.tensor_sharding import TensorSharding, parameter_shardings, rows_on_rank


@dataclass(frozen=True, kw_only=True)
class RankTensors:
    """Tensors of a rank."""

    dense: Shapes
    """Tensors except separate experts; each data-parallel rank has a copy of them, or some rows."""
    shards: int
    """Ranks that shard the rows of `dense`."""
    expert: Shapes
    """Experts with data-parallel ranks of their own, if ranks have different experts."""
    expert_shards: int
    """Ranks that shard the rows of `expert`."""
    names: tuple[str, ...]
    """Names of all tensors of `dense` and `expert`, in the model's order."""
    frozen: frozenset[str] = frozenset()
    """Names of those that are not trained."""
    quantized: frozenset[str] = frozenset()
    """Names of those frozen ones that are stored in bytes, which their shapes count."""
    num_forward_only_blocks: int = 0
    """Number of blocks, the first ones, without a backward pass."""
    carried: Shapes = field(default_factory=dict)
    """Tensors of its layers that are loaded and saved with the model, and not trained; ranks have copies."""
    embedding_copy: Shape | None = None
    """Shape of the copy of an embedding that another rank trains (`parallel.pipeline.shared_embedding`)."""

    @property
    def all(self) -> Shapes:
        """Tensors of `dense` and `expert`, in the model's order."""
        shapes = self.dense | self.expert
        return {name: shapes[name] for name in self.names}

    @property
    def trained(self) -> Shapes:
        """Trained tensors, in the model's order."""
        return self.without_frozen(self.all)

    def without_frozen(self, shapes: Shapes) -> Shapes:
        """Return those of some tensors that are trained."""
        return {name: shape for name, shape in shapes.items() if name not in self.frozen} if self.frozen else shapes

    def shards_of(self, name: str) -> int:
        """Return the number of ranks that shard the rows of a tensor."""
        return self.expert_shards if name in self.expert else self.shards

    def matrix_numbers(self, name: str) -> int:
        """Return the numbers of a matrix, or of one of a stack."""
        shape = self.expert[name] if name in self.expert else self.dense[name]
        elements = num_elements(shape[-2:])
        return elements // NF4_BLOCK_BYTES * NF4_BLOCK if name in self.quantized else elements

    def itemsize(self, name: str, size: int) -> int:
        """Return the bytes of an element of a tensor, where those of other tensors have `size`."""
        return 1 if name in self.quantized else size

    @property
    def signature(self) -> tuple[object, ...]:
        """Key that is equal for ranks of one model and layout that differ in block indices only."""
        return (
            tuple(map(strip_block_index, self.dense)),
            tuple(map(strip_block_index, self.expert)),
            tuple(map(strip_block_index, self.carried)),
            tuple(strip_block_index(name) for name in self.names if name in self.frozen),
            bool(self.quantized),
            self.embedding_copy,
        )


def rank_tensors(resolved: ResolvedRun, tp_rank: int = 0) -> list[RankTensors]:
    """Return the tensors of one rank per pipeline rank; one entry without a pipeline.

    `tp_rank` selects the tensor-parallel rank; rank 0 has the largest shards. Raises UserError if the ranks cannot be
    divided like this.
    """
    run = resolved.run
    spec = run.model
    layout = run.layout
    dims = resolved.dims
    num_copies = dims.dp_replicate if layout.data_parallel == "hsdp" else 1
    expert_replicas = dims.expert_dp_size // num_copies
    shardings = parameter_shardings(spec, layout)
    parameters = model_parameters(spec)
    shapes = {
        name: local_shape(layout, sharding, parameters[name].stored_shape, tp_rank=tp_rank)
        for name, sharding in shardings.items()
    }
    expert_names = {name for name, sharding in shardings.items() if sharding.mesh_axis == "ep"}
    carried = {name: tensor.shape for name, tensor in carried_tensors(spec).items()}
    frozen = frozenset(name for name, parameter in parameters.items() if parameter.is_frozen)
    quantized = frozenset(name for name, parameter in parameters.items() if parameter.is_quantized)
    expert_shards = expert_replicas if layout.data_parallel in SHARDED_STRATEGIES else 1
    return [
        RankTensors(
            dense={name: shapes[name] for name in names if name in shapes and name not in expert_names},
            shards=resolved.data_dims.dp_shard,
            expert={name: shapes[name] for name in names if name in expert_names},
            expert_shards=expert_shards,
            frozen=frozen.intersection(names),
            quantized=quantized.intersection(names),
            num_forward_only_blocks=num_forward_only_blocks(spec, has_pipeline=layout.pp > 1),
            carried={name: carried[name] for name in names if name in carried},
            names=tuple(name for name in names if name in shapes),
            embedding_copy=shapes["embedding.weight"] if has_copy else None,
        )
        for names, has_copy in _stage_tensor_names(run, [*shapes, *carried])
    ]


def local_shape(layout: Layout, sharding: TensorSharding, shape: Shape, tp_rank: int) -> Shape:
    """Return the shape on one of the ranks that share a tensor; expert shards have equal size."""
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
    """Return the tensors of each pipeline rank, and whether it also has a copy of the embedding."""
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
    return [
        (members, run.model.reuses_embedding and rank == last != first) for rank, members in enumerate(names_by_rank)
    ]

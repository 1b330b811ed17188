"""Sharding of a model's tensors over tensor-parallel ranks, from the declaration of its parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from math import prod
from typing import Literal

from phalanx.spec.layout import Layout
from phalanx.spec.model import ModelSpec
from phalanx.spec.parts.block import Block, blocks
from phalanx.spec.parts.model import layer_inputs, model_parameters
from phalanx.spec.parts.operations import (
    Activation,
    Core,
    Cut,
    GatedNorm,
    GroupedLinear,
    Linear,
    LookUp,
    Magnitude,
    Norm,
    Operation,
)


@dataclass(frozen=True)
class TensorSharding:
    """Sharding of one tensor over ranks. Neighbors may have the same shard."""

    dim: int | None
    """Sharded dimension of the tensor; None: every rank has the full tensor."""
    replication: int
    """Number of neighbors that have the same shard."""
    mesh_axis: Literal["tp", "ep"] = "tp"
    """Mesh axis whose ranks share the tensor."""
    is_partial_sum: bool = False
    """True if ranks with the same shard each process only some of its tokens or heads, so that their gradients must be
    summed."""


@lru_cache
def parameter_shardings(spec: ModelSpec, layout: Layout) -> Mapping[str, TensorSharding]:
    """Return the sharding of each parameter over tensor- or expert-parallel ranks, by the operation that has it.

    Embeddings and head are sharded by vocabulary. Operations on single tokens are replicated; with sequence parallelism
    they process only the tokens of this rank (arXiv 2205.05198, section 4.2.2).
    """
    of_block = cache(partial(block_shardings, layout=layout))
    vocabulary = TensorSharding(0, 1) if layout.tp > 1 else _replicated(layout)
    shardings = {"embedding.weight": vocabulary, "head.weight": vocabulary}
    if inputs := layer_inputs(spec):
        for operation in inputs.operations:
            for name in operation.named_parameters:
                shardings[f"{inputs.name}.{name}"] = operation_sharding(operation, name, layout)
    for layer, block in enumerate(blocks(spec, layout)):
        shardings |= {f"blocks.{layer}.{name}": sharding for name, sharding in of_block(block).items()}
    return {name: shardings.get(name, _replicated(layout)) for name in model_parameters(spec)}


def block_shardings(block: Block, layout: Layout) -> dict[str, TensorSharding]:
    """Return the sharding of each parameter of a block, by its name in the block."""
    shardings: dict[str, TensorSharding] = {}
    for branch in block:
        shardings |= {name: _replicated(layout) for norm in branch.norms for name in norm.named_parameters}
        for operation in branch.part.operations:
            for name in operation.named_parameters:
                shardings[f"{branch.part.name}.{name}"] = operation_sharding(operation, name, layout)
    return shardings


def operation_sharding(operation: Operation, name: str, layout: Layout) -> TensorSharding:
    """Return the sharding of a parameter of an operation.

    Queries, keys, values and the first projections of an MLP are sharded by output, the projections after them by input
    (Megatron-LM, arXiv 1909.08053, section 3). Key/value heads are replicated if there are fewer heads than ranks.
    Experts are sharded like MLPs, or with expert parallelism between experts.
    """
    if isinstance(operation, GroupedLinear) and layout.ep > 1:
        return TensorSharding(0, 1, "ep", is_partial_sum=True)
    if layout.tp == 1:
        return _replicated(layout)
    match operation:
        case LookUp():
            return TensorSharding(0, 1)
        case Linear():
            matrix_dim = 1 if isinstance(operation, GroupedLinear) else 0
            if operation.role == "column":
                assert operation.writes.cut
                return _sharded_units(operation.writes.cut, layout.tp, matrix_dim)
            if operation.role == "row" and not name.endswith("bias"):
                return TensorSharding(matrix_dim + 1, 1)
            if operation.role == "row" and isinstance(operation, GroupedLinear):
                # Each rank adds its share of the bias to its term of the sum.
                return _replicated(layout, partial=True)
            if isinstance(operation, GroupedLinear):
                # The factor of an adapter between two others of which each rank has a part.
                return _replicated(layout, partial=True)
        case Magnitude(writes=y) if y.cut is not None:
            return _sharded_units(y.cut, layout.tp)
        case GatedNorm(reads=(x, _)) if x.cut is not None:
            return _sharded_units(x.cut, layout.tp)
        case Norm(reads=(x,)) if x.cut is not None:
            # Each head is on some ranks only, which add to the gradient of a scale that all heads share.
            is_sharded = operation.crosses_ranks or (operation.kind == "head_layernorm" and x.cut.share == "units")
            return _sharded_units(x.cut, layout.tp) if is_sharded else _replicated(layout, partial=True)
        case Activation():
            return _replicated(layout, partial=True)
        case Core():
            cut = operation.named_parameters[name].cut or operation.heads
            return _sharded_units(cut, layout.tp) if cut.share == "units" else _replicated(layout, partial=True)
    return _replicated(layout)


def _sharded_units(cut: Cut, ranks: int, dim: int = 0) -> TensorSharding:
    replication = cut.replication(ranks)
    return TensorSharding(None if replication == ranks else dim, replication, is_partial_sum=replication > 1)


def _replicated(layout: Layout, partial: bool = False) -> TensorSharding:
    """Return the sharding of a tensor of which each rank has all, but uses it for all tokens and heads or for some."""
    return TensorSharding(None, layout.tp, is_partial_sum=layout.tp > 1 and (partial or layout.sequence_parallel))


def head_replications(spec: ModelSpec, tp: int) -> list[int]:
    """Return the numbers of ranks that have the same key/value heads, which may differ between layers, ascending."""
    parts = (branch.part for block in dict.fromkeys(blocks(spec)) for branch in block)
    return sorted({1, *(cut.replication(tp) for part in parts for cut in part.cuts if cut.copied_below)})


def rows_on_rank(rank: int, rows: int, ranks: int) -> int:
    """Return the number of rows of a rank.

    The first ranks have ceil(rows / ranks) each, the last possibly fewer or none.
    """
    rows_per_rank = -(-rows // ranks)
    return max(0, min(rows_per_rank, rows - rank * rows_per_rank))


def data_parallel_axis(shape: Sequence[int], ranks: int) -> int:
    """Return the axis on which data-parallel ranks shard a tensor: its rows, or those of each matrix of a stack.

    A stack of fewer experts than ranks would leave ranks without a part of it (torchtitan shards it like this too). The
    rows of its matrices are sharded if they can be sharded equally, which FSDP2 requires.
    """
    return int(len(shape) == 3 and 0 < shape[0] < ranks and shape[1] % ranks == 0)


def has_strided_shards(shape: Sequence[int], ranks: int) -> bool:
    """Return whether a data-parallel rank's part of a tensor is not contiguous in it: rows of several matrices."""
    return shape[0] > 1 and data_parallel_axis(shape, ranks) == 1


@lru_cache(maxsize=2**14)  # blocks repeat, and a search counts them thousands of times
def max_shard_elements(shape: tuple[int, ...], ranks: int) -> int:
    """Return the elements of the first of `ranks` that shard a tensor on its data-parallel axis.

    All ranks have an equal number of rows. The last can have fewer, or padding if all send or store the same number.
    """
    axis = data_parallel_axis(shape, ranks)
    return -(-shape[axis] // ranks) * prod(shape[:axis]) * prod(shape[axis + 1 :])

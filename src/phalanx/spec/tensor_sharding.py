"""Sharding of a model's tensors over tensor-parallel ranks, from the declaration of its parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from math import lcm, prod
from typing import Literal

from phalanx.spec.attention_backend import has_window, smallest_window
from phalanx.spec.base import divisors
from phalanx.spec.errors import UserError
from phalanx.spec.layers import distinct_layers
from phalanx.spec.layout import Layout
from phalanx.spec.model import ModelSpec
from phalanx.spec.parts.block import Block, blocks
from phalanx.spec.parts.model import model_parameters
from phalanx.spec.parts.operations import Core, Cut, GroupedLinear, Linear, Norm, Operation
from phalanx.spec.resolved_run import ResolvedRun

FP8_MULTIPLE = 16
"""Divisor of the rows and columns that products in float8 (`torch._scaled_mm`) accept."""


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

    Embedding and head are sharded by vocabulary. Operations on single tokens are replicated; with sequence parallelism
    they process only the tokens of this rank (arXiv 2205.05198, section 4.2.2).
    """
    of_block = cache(partial(block_shardings, layout=layout))
    vocabulary = TensorSharding(0, 1) if layout.tp > 1 else _replicated(layout)
    shardings = {"embedding.weight": vocabulary, "head.weight": vocabulary}
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
        case Linear():
            matrix_dim = 1 if isinstance(operation, GroupedLinear) else 0
            if operation.role == "column":
                assert operation.writes.cut
                return _sharded_units(operation.writes.cut, layout.tp, matrix_dim)
            if operation.role == "row" and not name.endswith(".bias"):
                return TensorSharding(matrix_dim + 1, 1)
        case Norm(reads=(x,)) if x.cut is not None:
            # Each head is on some ranks only, which add to the gradient of a scale that all heads share.
            return _sharded_units(x.cut, layout.tp) if operation.crosses_ranks else _replicated(layout, partial=True)
        case Core():
            return TensorSharding(0, 1) if operation.heads.share == "units" else _replicated(layout, partial=True)
    return _replicated(layout)


def _sharded_units(cut: Cut, ranks: int, dim: int = 0) -> TensorSharding:
    replication = cut.replication(ranks)
    return TensorSharding(None if replication == ranks else dim, replication, is_partial_sum=replication > 1)


def _replicated(layout: Layout, partial: bool = False) -> TensorSharding:
    """Return the sharding of a tensor of which each rank has all, but uses it for all tokens and heads or for some."""
    return TensorSharding(None, layout.tp, is_partial_sum=layout.tp > 1 and (partial or layout.sequence_parallel))


def kv_head_replication(spec: ModelSpec, tp: int) -> int:
    """Return the number of ranks that have the same key/value heads."""
    return max(Cut(layer.num_kv_heads, copied_below=True).replication(tp) for layer in distinct_layers(spec))


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


def check_divisibility(resolved: ResolvedRun) -> None:
    """Raise UserError for a model that cannot be divided among the ranks.

    Checks heads, widths, vocabulary, experts and tokens.
    """
    run = resolved.run
    spec = run.model
    layout = run.layout
    if layout.tp > 1:
        _check_tensor(spec, layout, run.training.seq_len)
    if run.training.precision == "fp8":
        for layer in distinct_layers(spec):
            _check_fp8(layer, layout)
    if spec.moe is not None and spec.moe.capacity_factor is not None:
        _check_capacity(layout, spec.moe.capacity_factor)
    if layout.ep > 1:
        _check_experts(resolved)
    if layout.tp > 1 and layout.gradient_compression == "powersgd":
        problem = f"cannot be combined with layout.tp = {layout.tp}: its approximation would make replicas differ"
        raise UserError("layout.gradient_compression", "powersgd", problem, "remove layout.gradient_compression")
    if layout.cp > 1:
        _check_context(spec, layout, run.training.seq_len)


def _check_tensor(spec: ModelSpec, layout: Layout, seq_len: int) -> None:
    layers = distinct_layers(spec)
    for layer in layers:
        _check_layer(layer, layout, seq_len)
    kv_heads = [layer.num_kv_heads for layer in layers]
    replications = {Cut(heads, copied_below=True).replication(layout.tp) for heads in kv_heads}
    if len(replications) > 1 and layout.tp_attention == "split":
        fewest = min(kv_heads)
        problem = "exceeds the key/value heads of some kinds of layers, but not of others"
        raise UserError("layout.tp", layout.tp, problem, f"use {fewest} or less, or kinds with equal num_kv_heads")
    rows = -(-spec.vocab_size // layout.tp)
    if (layout.tp - 1) * rows >= spec.vocab_size:
        problem = f"leaves a rank without rows of the embedding (model.vocab_size = {spec.vocab_size})"
        fix = "use a smaller tensor-parallel degree, or a larger vocabulary"
        raise UserError("layout.tp", layout.tp, problem, fix)


def _check_layer(spec: ModelSpec, layout: Layout, seq_len: int) -> None:
    """Check the heads and widths of a layer (`spec.layers`), which tensor-parallel ranks share."""
    tp = layout.tp
    widths = {"model.num_heads": spec.num_heads} if layout.tp_attention == "split" else {}
    if spec.moe is None:
        widths["model.ffn_hidden_size"] = spec.ffn_hidden_size
    elif layout.ep == 1:
        widths["model.moe.expert_ffn_size"] = spec.moe.expert_ffn_size
    elif spec.moe.num_shared_experts:
        shared_width = spec.moe.expert_ffn_size * spec.moe.num_shared_experts
        widths["model.moe.expert_ffn_size x num_shared_experts"] = shared_width
    if layout.sequence_parallel:
        widths["training.seq_len"] = seq_len
    alternatives = {"training.seq_len": "sequence_parallel = false", "model.num_heads": 'tp_attention = "gathered"'}
    for field, size in widths.items():
        if size % tp:
            alternative = f", or layout.{alternatives[field]}" if field in alternatives else ""
            fix = f"use a tensor-parallel degree that divides {field}{alternative}"
            raise UserError("layout.tp", tp, f"does not divide {field} ({size})", fix)
    problem = ""
    if layout.tp_attention == "gathered":
        width = spec.num_heads * spec.head_dim
        if spec.num_kv_heads != spec.num_heads:
            problem = f"requires model.num_kv_heads ({spec.num_kv_heads}) to equal model.num_heads ({spec.num_heads})"
        elif width % tp:
            problem = f"requires model.num_heads x model.head_dim ({width}) to be a multiple of layout.tp ({tp})"
        elif layout.cp > 1:
            problem = f"cannot be combined with context parallelism (layout.cp = {layout.cp})"
        if problem:
            fix = 'use layout.tp_attention = "split" with a degree that divides the heads'
            raise UserError("layout.tp_attention", layout.tp_attention, problem, fix)
    elif spec.num_kv_heads % tp and tp % spec.num_kv_heads:
        problem = f"neither divides model.num_kv_heads ({spec.num_kv_heads}) nor is a multiple of it"
        raise UserError("layout.tp", tp, problem, "use a divisor or a multiple of model.num_kv_heads")


def _check_fp8(spec: ModelSpec, layout: Layout) -> None:
    """Check the widths of a layer's products in float8, each of which some ranks share."""
    tp = layout.tp
    kv_ranks = tp if layout.tp_attention == "gathered" else min(tp, spec.num_kv_heads)
    widths = {
        "model.hidden_size": (spec.hidden_size, 1),
        "model.num_heads x head_dim": (spec.num_heads * spec.head_dim, tp),
        "model.num_kv_heads x head_dim": (spec.num_kv_heads * spec.head_dim, kv_ranks),
    }
    if spec.moe is None:
        widths["model.ffn_hidden_size"] = (spec.ffn_hidden_size, tp)
    else:
        widths["model.moe.expert_ffn_size"] = (spec.moe.expert_ffn_size, 1 if layout.ep > 1 else tp)
        shared_width = spec.moe.expert_ffn_size * spec.moe.num_shared_experts
        widths["model.moe.expert_ffn_size x num_shared_experts"] = (shared_width, tp)
    for field, (size, ranks) in widths.items():
        if size % (FP8_MULTIPLE * ranks):
            per_rank = f" on each of {ranks} ranks" if ranks > 1 else ""
            problem = f"requires widths that are multiples of {FP8_MULTIPLE}{per_rank}, and {field} is {size}"
            smaller_degree = "use a smaller layout.tp, " if ranks > 1 else ""
            fix = f'change {field}, {smaller_degree}or set training.precision = "bf16"'
            raise UserError("training.precision", "fp8", problem, fix)


def _check_capacity(layout: Layout, capacity_factor: float) -> None:
    if layout.cp > 1 or (layout.tp > 1 and layout.sequence_parallel):
        sharing_option = "layout.cp" if layout.cp > 1 else "layout.sequence_parallel"
        requirement = ", which layout.ep requires with layout.tp," if layout.cp == 1 < layout.ep else ""
        problem = f"requires full sequences on each rank, but {sharing_option}{requirement} splits sequences"
        alternative = ", layout.ep or layout.tp" if requirement else f" or {sharing_option}"
        fix = f"remove model.moe.capacity_factor{alternative}"
        raise UserError("model.moe.capacity_factor", capacity_factor, problem, fix)


def _check_experts(resolved: ResolvedRun) -> None:
    run = resolved.run
    layout = run.layout
    ep = layout.ep
    moe = run.model.moe
    if moe is None:
        raise UserError("layout.ep", ep, "cannot be combined with a model without experts", "set layout.ep = 1")
    if moe.num_experts % ep:
        problem = f"does not divide model.moe.num_experts ({moe.num_experts})"
        raise UserError("layout.ep", ep, problem, f"use one of {', '.join(map(str, divisors(moe.num_experts)))}")
    if layout.tp > 1 and not layout.sequence_parallel:
        problem = f"requires sequence parallelism with layout.tp = {layout.tp}, so that ranks have different tokens"
        raise UserError("layout.ep", ep, problem, "set layout.sequence_parallel = true")
    # Ranks that exchange tokens for experts must have equal numbers of micro-batches.
    if (layout.cp * layout.tp) % ep and not resolved.batch.has_equal_micro_batches:
        problem = f"results in different numbers of micro-batches per rank; layout.ep = {ep} requires equal numbers"
        fix = "use a multiple of micro-batch size x data-parallel ranks x training.seq_len"
        raise UserError("training.tokens_per_step", run.training.tokens_per_step, problem, fix)


def _check_context(spec: ModelSpec, layout: Layout, seq_len: int) -> None:
    cp = layout.cp
    num_chunks = cp * (2 if layout.cp_method == "ring" else 1)
    required_multiple = lcm(num_chunks, cp * (layout.tp if layout.sequence_parallel else 1))
    if seq_len % required_multiple:
        problem = f"requires training.seq_len ({seq_len}) to be a multiple of {required_multiple}"
        nearest_seq_len = max(1, round(seq_len / required_multiple)) * required_multiple
        raise UserError("layout.cp", cp, problem, f"use training.seq_len = {nearest_seq_len}, or a smaller degree")
    if layout.cp_method == "ring" and has_window(spec, seq_len):
        window = smallest_window(spec)
        problem = f"does not support the windows of model.sliding_window ({window})"
        fix = f'use "ulysses", or training.seq_len = {window} or less'
        raise UserError("layout.cp_method", "ring", problem, fix)
    for layer in distinct_layers(spec):
        heads = layer.num_heads // layout.tp
        kv = max(1, layer.num_kv_heads // layout.tp)
        if layout.cp_method == "ulysses" and (heads % cp or (kv % cp and cp % kv)):
            problem = f"does not divide the {heads} heads ({kv} key/value heads) of a tensor-parallel rank"
            raise UserError("layout.cp", cp, problem, 'use layout.cp_method = "ring", or a smaller degree')

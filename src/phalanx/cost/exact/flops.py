"""Floating-point operations per token, and the fraction of the hardware's peak that a run reaches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from phalanx.cost.exact.forward_shape import forward_shape
from phalanx.cost.kinds import Recomputation
from phalanx.program.pipeline_split import layers_per_rank, recomputed_layers
from phalanx.program.rank_tensors import RankTensors, rank_tensors
from phalanx.schedule.registry import representative_schedule
from phalanx.spec.files.teacher import resolved_teacher
from phalanx.spec.model import ModelSpec
from phalanx.spec.parameter_shapes import num_elements
from phalanx.spec.parts.block import blocks
from phalanx.spec.parts.flops import backward_product_flops, core_flops, kernel_flops, product_flops, tokens_through
from phalanx.spec.parts.model import is_head_trained, layer_inputs, num_forward_only_blocks
from phalanx.spec.parts.operations import GroupedLinear, Linear, Part, Shape
from phalanx.spec.resolved_run import ResolvedRun
from phalanx.spec.run import RunSpec
from phalanx.spec.tuning import TuningSpec

SELECTIVE_MATMUL_FRACTION = 0.35
"""Fraction of a block's linear FLOPs that torchtitan's selective mode recomputes: every second one.

These are the products of the keys, the output and one of the MLP (0.37 in Llama 3 8B, less with fewer key/value heads).
"""


@dataclass(frozen=True)
class ForwardFlops:
    """FLOPs of the forward pass on one token, by part."""

    projections: float
    """Attention's projections: queries, keys, values and output."""
    core: float
    """Attention's two products of tokens with each other."""
    mlp: float
    """MLPs, the experts that a token uses, and routers."""
    head: float
    inputs: float = 0.0
    """Products of the embedding for the inputs of layers."""

    @property
    def blocks(self) -> float:
        """FLOPs of all blocks."""
        return self.projections + self.core + self.mlp


@lru_cache
def forward_flops(spec: ModelSpec, seq_len: int, causal: bool = True) -> ForwardFlops:
    """Return the FLOPs of the forward pass on one token, by part.

    2 per matrix-product parameter (Kaplan et al., arXiv 2001.08361, section 2.1), plus attention's two products with
    the other tokens, 4 L H head_dim T (PaLM, arXiv 2204.02311, appendix B), or less with a sliding window.

    Args:
        seq_len: T, tokens of a sequence.
        causal: Count the lower triangle of attention pairs only, which is half. PaLM counts every pair.
    """
    projections = core = mlp = 0.0
    for block in blocks(spec):
        for branch in block:
            products = product_flops(branch.part)
            if branch.part.kind == "attention":
                projections += products
                core += core_flops(branch.part, seq_len, causal)
            else:
                mlp += products
    part = layer_inputs(spec)
    return ForwardFlops(
        projections,
        core,
        mlp,
        head=2.0 * spec.vocab_size * spec.hidden_size * spec.num_logits,
        inputs=product_flops(part) if part else 0.0,
    )


def forward_flops_per_token(spec: ModelSpec, seq_len: int, causal: bool = True) -> float:
    """Return the FLOPs of the forward pass on one token, a third of training's.

    Args:
        seq_len: Tokens of a sequence.
        causal: Count half of the attention pairs.
    """
    flops = forward_flops(spec, seq_len, causal)
    return flops.inputs + flops.blocks + flops.head


def training_flops_per_token(spec: ModelSpec, seq_len: int, causal: bool = True) -> float:
    """Return the FLOPs to train on one token: forward, and twice as many in backward (Kaplan et al.).

    Frozen weights have no gradients, and blocks before all trained parameters no backward pass. Recomputation is not
    included.

    Args:
        seq_len: Tokens of a sequence.
        causal: Count half of the attention pairs.
    """
    forward = forward_flops_per_token(spec, seq_len, causal)
    if spec.tuning == TuningSpec():
        return 3 * forward
    first = num_forward_only_blocks(spec)
    backward = sum(
        backward_product_flops(branch.part) + 2 * core_flops(branch.part, seq_len, causal)
        for block in blocks(spec)[first:]
        for branch in block
    )
    inputs = layer_inputs(spec)
    return forward + backward + head_backward_flops(spec) + (backward_product_flops(inputs) if inputs else 0.0)


def head_backward_flops(spec: ModelSpec) -> float:
    """Return the FLOPs of the head's gradients on one token: of its input, and of its matrix if that is trained."""
    return 2.0 * spec.vocab_size * spec.hidden_size * spec.num_logits * (1 + is_head_trained(spec))


def recomputed_flops_per_token(
    spec: ModelSpec,
    seq_len: int,
    recompute: Recomputation,
    *,
    flash: bool = True,
    sharded: bool = False,
    causal: bool = True,
) -> float:
    """Return the FLOPs that the backward pass recomputes on one token, as in the planner's `block_time`.

    Recomputation inside kernels, such as flash attention's scores, does not count.

    Args:
        seq_len: Tokens of a sequence.
        recompute: Method of activation checkpointing.
        flash: Flash kernels save no scores, so SELECTIVE (arXiv 2205.05198, section 5) recomputes nothing.
        sharded: The trainer uses FSDP, so OPERATIONS recomputes products.
        causal: Count half of the attention pairs.
    """
    flops = forward_flops(spec, seq_len, causal)
    return {
        "none": 0.0,
        "norms": 0.0,
        "attention core": 0.0 if flash else flops.core,
        "operations": SELECTIVE_MATMUL_FRACTION * (flops.projections + flops.mlp) if sharded else 0.0,
        "full": flops.blocks,
        "offload": flops.blocks,
        "selective": flops.projections + flops.core,
    }[recompute]


def run_recomputed_flops_per_token(run: RunSpec) -> float:
    """Return the FLOPs that the backward pass of a run recomputes on one token, with equal blocks."""
    method = run.layout.activation_checkpointing
    all_blocks = run.layout.recomputed_blocks is None
    fraction = 1.0 if all_blocks else len(recomputed_layers(run)) / run.model.num_blocks
    return fraction * recomputed_flops_per_token(run.model, run.training.seq_len, method)


def rank_flops(resolved: ResolvedRun, rank: int) -> float:
    """Return the FLOPs of a rank's forward and backward passes in one update, including recomputation.

    They are those of the rank's shards of tensors and attention, with balanced experts. Attention has half of the pairs
    of a sequence's tokens, as if it were one document. Parameter servers compute nothing. The forward passes of a
    teacher are included.
    """
    run = resolved.run
    dims = resolved.dims
    if rank < dims.servers:
        return 0.0
    coordinates = dims.coordinates(rank)
    tokens = _rank_tokens(resolved, coordinates)
    tensors = rank_tensors(resolved, coordinates["tp"])[coordinates["pp"]]
    layers = sorted(layers_per_rank(run)[coordinates["pp"]])
    products = _block_product_flops(run, tensors, tokens, layers=layers)
    core = _attention_core_flops(run, layers, tokens)
    recomputed = 0.0
    if run.layout.recomputes_attention:
        first = num_forward_only_blocks(run.model, has_pipeline=run.layout.pp > 1)
        again = layers[first : run.layout.recomputed_on_rank(coordinates["pp"], len(layers))]
        recomputed_products = _block_product_flops(run, tensors, tokens, layers=again)
        recomputed = _attention_core_flops(run, again, tokens) + (
            recomputed_products.total
            if run.layout.recomputes_full_blocks
            else _recomputed_attention_flops(run, recomputed_products)
        )
    head_shape = lm_head_shape(run, tensors, coordinates["pp"])
    head = 0.0
    if head_shape:
        shape = forward_shape(resolved)
        is_repeated = shape.recomputes_logits and shape.num_logits_chunks(run.model) > 1
        num_products = 2 + is_head_trained(run.model) + is_repeated
        head = 2 * num_products * tokens * num_elements(head_shape) * run.model.num_logits
    # Blocks before all trained parameters have no backward pass.
    first = num_forward_only_blocks(run.model, has_pipeline=run.layout.pp > 1)
    with_backward = [layer for layer in layers if layer >= first]
    backward = _block_product_flops(run, tensors, tokens, layers=with_backward)
    backward_flops = backward.total + backward.trained + 2 * _attention_core_flops(run, with_backward, tokens)
    flops = 3 * _layer_input_flops(run, tokens) + products.total + core + backward_flops + recomputed + head
    teacher = resolved_teacher(resolved)
    return flops if teacher is None else flops + _inference_flops(teacher, coordinates)


def _inference_flops(resolved: ResolvedRun, coordinates: Mapping[str, int]) -> float:
    """Return the FLOPs of a rank's forward passes in one update, with one product of the head for each token."""
    run = resolved.run
    tokens = _rank_tokens(resolved, coordinates)
    tensors = rank_tensors(resolved, coordinates["tp"])[coordinates["pp"]]
    layers = [layer for layer in layers_per_rank(run)[coordinates["pp"]] if layer < run.model.num_layers]
    products = _block_product_flops(run, tensors, tokens, layers=layers)
    head_shape = lm_head_shape(run, tensors, coordinates["pp"])
    head = 2 * tokens * num_elements(head_shape) if head_shape else 0.0
    return _layer_input_flops(run, tokens) + products.total + _attention_core_flops(run, layers, tokens) + head


def _layer_input_flops(run: RunSpec, tokens: float) -> float:
    """Return the FLOPs of the forward pass in a rank's products for the inputs of layers."""
    part = layer_inputs(run.model)
    linears = part.linears if part else ()
    return sum(2 * tokens_through(linear, run.layout, tokens) * linear.matrix.numbers for linear in linears)


def _rank_tokens(resolved: ResolvedRun, coordinates: Mapping[str, int]) -> float:
    """Return the tokens that a rank processes in an update; the first data-parallel ranks get the remaining rows."""
    dims = resolved.dims
    dp_rank = coordinates["dp_replicate"] * dims.dp_shard + coordinates["dp_shard"]
    rows, remainder = divmod(resolved.batch.global_batch_size, resolved.batch.dp_size)
    return (rows + (dp_rank < remainder)) * resolved.run.training.seq_len / dims.cp


@dataclass(frozen=True)
class _BlockProductFlops:
    """FLOPs of the forward pass in a rank's matrix products with parameters of some blocks."""

    total: float
    attention: float
    """Part of `total` in attention's projections."""
    output: float
    """Part of `attention` in its output projection."""
    trained: float
    """Part of `total` in products with trained matrices."""


def _block_product_flops(
    run: RunSpec, tensors: RankTensors, tokens: float, layers: Sequence[int]
) -> _BlockProductFlops:
    total = 0.0
    attention = 0.0
    output = 0.0
    trained = 0.0
    for product in block_products(run, layers):
        flops = 2 * product.tokens(run, tokens) * tensors.matrix_numbers(product.name)
        total += flops
        trained += flops if product.linear.is_trained else 0
        if product.part.kind == "attention":
            attention += flops
            output += flops if product.linear is product.part.linears[-1] else 0
    return _BlockProductFlops(total, attention, output, trained)


def _recomputed_attention_flops(run: RunSpec, products: _BlockProductFlops) -> float:
    """Return the FLOPs of attention's projections that selective recomputation repeats.

    PyTorch stops at the last saved tensor, the input of the output projection. A product of our own saves its operands
    after it is computed."""
    splits_backward = run.layout.pp > 1 and representative_schedule(run.layout).splits_backward
    has_own_product = run.layout.tp > 1 or run.training.precision == "fp8" or splits_backward
    return products.attention if has_own_product else products.attention - products.output


def _attention_core_flops(run: RunSpec, layers: Sequence[int], tokens: float) -> float:
    """Return the FLOPs of attention's kernel in the forward pass of some layers on a rank's heads."""
    model_blocks = blocks(run.model)
    ulysses = run.layout.cp if run.layout.cp_method == "ulysses" else 1
    per_token = sum(
        kernel_flops(branch.part, run.training.seq_len, run.layout.tp, ulysses)
        for layer in layers
        for branch in model_blocks[layer]
    )
    return per_token * tokens


@dataclass(frozen=True)
class Product:
    """A matrix product of a layer."""

    name: str
    """Name of its matrix in the model, or of its stack of matrices."""
    part: Part
    linear: Linear

    def tokens(self, run: RunSpec, tokens: float) -> float:
        """Return the number of a rank's tokens that it multiplies: the rows of all experts together, if balanced.

        Args:
            run: Run whose layout shares the product.
            tokens: Tokens of the tensor-parallel ranks together.
        """
        capacity = run.model.moe.capacity_factor if run.model.moe and isinstance(self.linear, GroupedLinear) else None
        return tokens_through(self.linear, run.layout, tokens) * min(1.0, capacity or 1.0)


def block_products(run: RunSpec, layers: Iterable[int]) -> Iterator[Product]:
    """Yield the matrix products of some layers."""
    model_blocks = blocks(run.model, run.layout)
    for layer in layers:
        for branch in model_blocks[layer]:
            for linear in branch.part.linears:
                leaf = next(iter(linear.parameters))
                yield Product(f"blocks.{layer}.{branch.part.name}.{linear.name}.{leaf}", branch.part, linear)


def lm_head_shape(run: RunSpec, tensors: RankTensors, pp_rank: int) -> Shape | None:
    """Return the shape of the matrix that computes logits on a pipeline rank, or None if it computes none.

    The matrix can be the embedding.

    Args:
        pp_rank: Pipeline rank.
    """
    if run.layout.pp > 1 and representative_schedule(run.layout).end_ranks[1] != pp_rank:
        return None
    return tensors.dense.get("head.weight") or tensors.embedding_copy or tensors.dense["embedding.weight"]


def mfu(tokens_per_second: float, flops_per_token: float, peak_flops: float, ranks: int) -> float:
    """Return the model FLOPs utilization (PaLM, arXiv 2204.02311, section 4.1): useful / peak FLOP/s.

    Recomputation is not useful work and does not count. With recomputation in `flops_per_token` the result is HFU,
    hardware FLOPs utilization.

    Args:
        tokens_per_second: Speed of the whole run.
        flops_per_token: FLOPs to train on one token.
        peak_flops: Peak FLOP/s of one rank.
        ranks: Number of ranks.
    """
    return tokens_per_second * flops_per_token / (peak_flops * ranks)

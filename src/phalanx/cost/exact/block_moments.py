"""Times in the backward pass of a block at which memory can peak: what exists in addition to what the block has saved.

Inner gradients, communication and gradients of weights exist one after the other, while saved tensors are freed. These
are the moments on a CPU. CUDA's only moment is the largest inner gradients, to which `comm_buffers` adds an estimate of
all communication.

`cost.exact.activation_memory` explains the symbols."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from phalanx.cost.exact.forward_shape import ForwardShape
from phalanx.cost.exact.saved_tensors import (
    expert_rows,
    fp8_cast_bytes,
    mlp_backward_bytes,
    saved_by_attention,
    saved_by_experts,
    saved_by_mlp,
)
from phalanx.spec.model import ModelSpec


@dataclass(frozen=True, kw_only=True)
class BlockMoment:
    """Bytes at one time of a block's backward pass, beyond those that are saved when it starts."""

    temporary: int
    """Bytes of inner gradients, minus saved tensors that are freed by then."""
    exchanged: int = 0
    """Bytes of communication."""
    own_weights: int = 0
    """Number of weights whose gradients are computed at this time."""
    block_weights: int = 0
    """Number of weights of the block whose gradients are computed by then, these included."""


@dataclass(frozen=True)
class WeightGradients:
    """Bytes of the gradient of a weight inside a block, unless another number contains them."""

    own: int = 0
    """Bytes while it is computed, if it is added to a sum at once."""
    block: int = 0
    """Bytes until the end of the block, if its unit of FSDP sends it then."""


NO_GRADIENTS = WeightGradients()


def largest_moment(moments: Iterable[BlockMoment], gradients: WeightGradients) -> int:
    """Return the maximum of the bytes of some moments."""
    return max(
        moment.temporary
        + moment.exchanged
        + gradients.own * moment.own_weights
        + gradients.block * moment.block_weights
        for moment in moments
    )


@dataclass(frozen=True, kw_only=True)
class BlockMoments:
    """Moments of a block, in their order."""

    mlp: tuple[BlockMoment, ...]
    attention: tuple[BlockMoment, ...] = ()


def block_moments(
    spec: ModelSpec, layer: int, shape: ForwardShape, *, output_gradient: int, splits_backward: bool
) -> BlockMoments:
    """Return the moments of a block.

    Args:
        layer: Index of the block in the model.
        shape: Sizes of a micro-batch on one rank.
        output_gradient: Bytes of the gradient of the block's output, unless another number contains it.
        splits_backward: True if the gradients of weights are deferred, with their operands.
    """
    if shape.on_cuda:
        temporary = mlp_backward_bytes(spec, layer, shape, splits_backward=splits_backward) + fp8_cast_bytes(
            spec, layer, shape
        )
        return BlockMoments(mlp=(BlockMoment(temporary=temporary + output_gradient),))
    is_moe = spec.moe is not None and spec.is_moe_layer(layer)
    mlp = _expert_moments if is_moe else _dense_mlp_moments
    moments = BlockMoments(
        mlp=mlp(spec, layer, shape, splits_backward=splits_backward), attention=_attention_moments(spec, layer, shape)
    )
    return BlockMoments(
        mlp=tuple(_moment_of_pass(moment, output_gradient, splits_backward) for moment in moments.mlp),
        attention=tuple(_moment_of_pass(moment, output_gradient, splits_backward) for moment in moments.attention),
    )


def _moment_of_pass(moment: BlockMoment, output_gradient: int, splits_backward: bool) -> BlockMoment:
    """Return the moment with the gradient of the block's output, and without gradients of weights that are deferred."""
    moment = replace(moment, temporary=moment.temporary + output_gradient)
    return replace(moment, own_weights=0, block_weights=0) if splits_backward else moment


def _dense_mlp_moments(
    spec: ModelSpec, layer: int, shape: ForwardShape, splits_backward: bool
) -> tuple[BlockMoment, ...]:
    """Return the moments of the last product, with the activation, and of the first products."""
    matrix = spec.hidden_size * shape.max_local_count(spec.ffn_hidden_size)
    num_first = 2 if spec.activation == "swiglu" else 1
    inner_gradients = mlp_backward_bytes(spec, layer, shape, splits_backward=splits_backward)
    activation_inputs = num_first * shape.tokens * shape.max_local_count(spec.ffn_hidden_size) * shape.compute_bytes
    gathered_gradient = _all_tokens_bytes(spec, shape)
    return (
        BlockMoment(
            temporary=inner_gradients + fp8_cast_bytes(spec, layer, shape),
            exchanged=gathered_gradient,
            own_weights=matrix,
            block_weights=matrix,
        ),
        BlockMoment(
            temporary=inner_gradients - activation_inputs + _input_gradient_bytes(spec, shape),
            exchanged=_input_exchange_bytes(spec, shape, splits_backward)
            + (gathered_gradient if splits_backward else 0),
            own_weights=matrix * (num_first if shape.tp > 1 else 1),
            block_weights=matrix * (num_first + 1),
        ),
    )


def _expert_moments(spec: ModelSpec, layer: int, shape: ForwardShape, splits_backward: bool) -> tuple[BlockMoment, ...]:
    """Return the moments of the weighted sum of the outputs, of the last product, and of the first products."""
    assert spec.moe is not None
    rows, F = expert_rows(spec.moe, shape)
    matrix = spec.moe.num_experts // shape.layout.ep * F * spec.hidden_size
    row_bytes = rows * spec.hidden_size * shape.compute_bytes
    inner_bytes = rows * F * shape.compute_bytes
    if splits_backward:
        temporary = mlp_backward_bytes(spec, layer, shape, splits_backward=splits_backward) + fp8_cast_bytes(
            spec, layer, shape
        )
        return (BlockMoment(temporary=temporary),)
    gathered_gradient = _all_tokens_bytes(spec, shape) if shape.layout.ep == 1 else 0
    return (
        BlockMoment(temporary=2 * row_bytes, exchanged=gathered_gradient),
        # The outputs are freed. The gradients of their rows are sorted, sent and received.
        *([BlockMoment(temporary=-row_bytes, exchanged=3 * row_bytes)] if shape.layout.ep > 1 else []),
        BlockMoment(
            # The gradients of the rows have replaced the outputs.
            temporary=2 * inner_bytes + fp8_cast_bytes(spec, layer, shape),
            own_weights=matrix,
            block_weights=matrix,
        ),
        BlockMoment(
            # The gradients of the activation's inputs have replaced these, and two of the rows the outputs.
            temporary=2 * row_bytes - row_bytes,
            own_weights=matrix,
            block_weights=3 * matrix,
        ),
    )


def _attention_moments(spec: ModelSpec, layer: int, shape: ForwardShape) -> tuple[BlockMoment, ...]:
    """Return the moments of attention, and of the products that project to heads."""
    D = spec.hidden_size
    q = shape.max_local_count(spec.num_heads) * spec.head_dim
    kv = shape.max_local_count(spec.num_kv_heads) * spec.head_dim
    has_separate_experts = shape.layout.ep > 1 and spec.moe is not None and spec.is_moe_layer(layer)
    mlp_weights = 0 if has_separate_experts else _mlp_weights(spec, layer, shape)
    freed_bytes = saved_by_mlp_or_experts(spec, layer, shape)
    head_gradients = shape.tokens * (q + 2 * kv) * shape.compute_bytes
    return (
        BlockMoment(
            temporary=head_gradients
            + shape.tokens * q * shape.compute_bytes  # the gradient of the output
            - freed_bytes,
            exchanged=attention_exchange_bytes(spec, shape),
            block_weights=mlp_weights + D * q,
        ),
        BlockMoment(
            temporary=head_gradients
            + _input_gradient_bytes(spec, shape)
            - saved_by_attention(spec, shape)["attention"]
            - freed_bytes,
            exchanged=_input_exchange_bytes(spec, shape, splits_backward=False),
            own_weights=D * (q + 2 * kv if shape.tp > 1 else q),
            block_weights=mlp_weights + 2 * D * (q + kv),
        ),
    )


def saved_by_mlp_or_experts(spec: ModelSpec, layer: int, shape: ForwardShape) -> int:
    """Return the bytes that a block's MLP or experts save.

    Args:
        layer: Index of the block in the model.
        shape: Sizes of a micro-batch on one rank.
    """
    if spec.moe is not None and spec.is_moe_layer(layer):
        return saved_by_experts(spec, spec.moe, shape).total()
    return saved_by_mlp(spec, shape).total()


def _mlp_weights(spec: ModelSpec, layer: int, shape: ForwardShape) -> int:
    """Return the number of weights in the products of a block's MLP or experts."""
    if spec.moe is not None and spec.is_moe_layer(layer):
        F = expert_rows(spec.moe, shape)[1]
        return 3 * spec.moe.num_experts // shape.layout.ep * F * spec.hidden_size
    num_products = 3 if spec.activation == "swiglu" else 2
    return num_products * spec.hidden_size * shape.max_local_count(spec.ffn_hidden_size)


def _all_tokens_bytes(spec: ModelSpec, shape: ForwardShape) -> int:
    """Return the bytes of the residual stream's tokens that tensor-parallel ranks gather; 0 if they have all."""
    is_gathered = shape.tp > 1 and shape.layout.sequence_parallel
    return shape.tokens * spec.hidden_size * shape.compute_bytes if is_gathered else 0


def _input_gradient_bytes(spec: ModelSpec, shape: ForwardShape) -> int:
    """Return the bytes of the gradient of what products of a norm's output read, and with `norms` of that output.

    Tensor-parallel ranks have terms of the gradient, which are in `_input_exchange_bytes`."""
    stream_bytes = shape.residual_tokens * spec.hidden_size * shape.residual_bytes
    norm_bytes = stream_bytes if shape.layout.activation_checkpointing == "norms" else 0
    return norm_bytes + (shape.tokens * spec.hidden_size * shape.compute_bytes if shape.tp == 1 else 0)


def _input_exchange_bytes(spec: ModelSpec, shape: ForwardShape, splits_backward: bool) -> int:
    """Return the bytes of tensor-parallel communication where products read a norm's output.

    Ranks have a gathered input, unless gradients of weights are deferred, and a term of the sum before and after the
    exchange. Without sequence parallelism they have a sum and its copy."""
    if shape.tp == 1:
        return 0
    all_tokens_bytes = shape.tokens * spec.hidden_size * shape.compute_bytes
    if not shape.layout.sequence_parallel:
        return 2 * all_tokens_bytes
    num_gathered = 0 if splits_backward else 1
    num_copies = 1 if shape.batch == 1 else 2  # tokens of several sequences are ordered by rank for the exchange
    sum_bytes = shape.residual_tokens * spec.hidden_size * shape.residual_bytes
    return (num_copies * (num_gathered + 1) + 1) * all_tokens_bytes + sum_bytes


def attention_exchange_bytes(spec: ModelSpec, shape: ForwardShape) -> int:
    """Return the bytes of communication inside attention.

    Ring attention has keys, values and their gradients, two of each (one in transit). Ulysses has the input and output
    of an all-to-all of queries, keys and values. Ranks with columns of heads have received queries and keys,
    contiguous, and with their gradients in transit."""
    layout = shape.layout
    gathered = 4 * spec.num_heads if shape.tp > 1 and layout.tp_attention == "gathered" else 0
    exchanged_bytes = shape.compute_bytes * gathered * shape.tokens * spec.head_dim
    if layout.cp == 1:
        return exchanged_bytes
    kv_heads = shape.max_local_count(spec.num_kv_heads)
    if layout.cp_method == "ring":
        return exchanged_bytes + shape.high_precision_bytes * 8 * kv_heads * shape.tokens * spec.head_dim
    num_heads = shape.max_local_count(spec.num_heads) + 2 * max(kv_heads, layout.cp)
    return exchanged_bytes + shape.compute_bytes * 2 * num_heads * shape.tokens * spec.head_dim

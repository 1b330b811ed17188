"""Bytes of a backward pass that is split into halves (`parallel.pipeline.split_backward`).

The first half saves, for every linear layer, its input, the gradient of its output, and under autocast the copy of its
weight. The second half computes the gradients of weights one by one, and frees the operands of each.

`cost.exact.activation_memory` adds them to the activations, and explains the symbols."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.cost.exact.forward_shape import ForwardShape
from phalanx.cost.exact.head_memory import saved_by_head
from phalanx.cost.exact.saved_tensors import expert_rows, saved_by_attention, saved_by_experts, saved_by_mlp
from phalanx.spec.model import ModelSpec


def deferred_bytes(
    spec: ModelSpec, shape: ForwardShape, *, layers: Sequence[int], recomputed: int, last: bool
) -> list[int]:
    """Return the bytes saved between the halves, per block, and for the head of the last stage.

    Args:
        shape: Sizes of a micro-batch on one rank.
        layers: Blocks of the stage.
        recomputed: Number of blocks, the first ones, that recompute activations.
        last: True if the stage has the head.
    """
    recomputes_norms = shape.layout.activation_checkpointing == "norms"
    blocks = [
        _deferred_by_block(spec, layer, shape, recomputes_norms=recomputes_norms and index < recomputed)
        for index, layer in enumerate(layers)
    ]
    return [*blocks, _deferred_by_head(spec, shape)] if last else blocks


def weight_gradient_bytes(spec: ModelSpec, shape: ForwardShape, *, layers: Sequence[int], last: bool) -> int:
    """Return the largest temporary bytes of the second half, beyond the operands that are freed by then.

    The head comes first.

    Args:
        shape: Sizes of a micro-batch on one rank.
        layers: Blocks of the stage.
        last: True if the stage has the head.
    """
    block_bytes = _gradient_bytes(
        shape, spec.hidden_size * max(_widest_product(spec, layer, shape) for layer in layers)
    )
    if not last or shape.num_logits_chunks(spec) > 1:
        return block_bytes
    head_bytes = _gradient_bytes(shape, spec.hidden_size * shape.max_local_count(spec.vocab_size))
    return max(head_bytes, block_bytes - _deferred_by_head(spec, shape))


def widened_gradient_bytes(spec: ModelSpec, shape: ForwardShape, *, layers: Sequence[int], last: bool) -> int:
    """Return the largest temporary bytes while a sum of gradients becomes fp32, beyond the operands freed by then.

    They are the gradient of a weight and the new sum; the old sum is a gradient that is counted already.

    Args:
        shape: Sizes of a micro-batch on one rank.
        layers: Blocks of the stage.
        last: True if the stage has the head, which comes first.
    """
    number_bytes = shape.compute_bytes + shape.high_precision_bytes
    widest = max(_widest_product(spec, layer, shape) for layer in layers)
    if not last:
        return number_bytes * spec.hidden_size * widest
    widest = max(widest, shape.max_local_count(spec.vocab_size))
    return number_bytes * spec.hidden_size * widest - _deferred_by_head(spec, shape)


def _gradient_bytes(shape: ForwardShape, count: int) -> int:
    """Return the bytes of the gradient of `count` weights, with its cast under autocast."""
    return count * (shape.compute_bytes + (shape.residual_bytes if shape.autocast else 0))


def _widest_product(spec: ModelSpec, layer: int, shape: ForwardShape) -> int:
    """Return the numbers per unit of the residual stream in the largest weight of a block."""
    attention_width = shape.max_local_count(spec.num_heads) * spec.head_dim
    if spec.moe is None or not spec.is_moe_layer(layer):
        return max(attention_width, shape.max_local_count(spec.ffn_hidden_size))
    return max(attention_width, spec.moe.num_experts // shape.layout.ep * expert_rows(spec.moe, shape)[1])


def _deferred_by_head(spec: ModelSpec, shape: ForwardShape) -> int:
    """Return the bytes that the second half of the head's backward pass needs; in chunks the first half does all."""
    return 0 if shape.num_logits_chunks(spec) > 1 else saved_by_head(spec, shape).total()


def _deferred_by_block(spec: ModelSpec, layer: int, shape: ForwardShape, recomputes_norms: bool) -> int:
    """Return the bytes that the second half of a block's backward pass needs.

    Args:
        layer: Index of the block in the model.
        shape: Sizes of a micro-batch on one rank.
        recomputes_norms: True if the layers that read a norm share its recomputed output.
    """

    def input_bytes(readers: int) -> int:
        return shape.linear_input_bytes(spec.hidden_size, 1 if recomputes_norms else readers)

    D = spec.hidden_size
    q = shape.max_local_count(spec.num_heads) * spec.head_dim
    kv = shape.max_local_count(spec.num_kv_heads) * spec.head_dim
    if shape.layout.tp_attention == "gathered":
        q = kv = spec.num_heads * spec.head_dim // shape.tp
    saved_bytes = input_bytes(readers=3) + shape.tokens * (2 * q + 2 * kv + D) * shape.compute_bytes
    saved_bytes += saved_by_attention(spec, shape)["weight_copies"]
    if spec.moe is None or not spec.is_moe_layer(layer):
        saved_bytes += saved_by_mlp(spec, shape)["weight_copies"]
        ffn = shape.max_local_count(spec.ffn_hidden_size)
        num_up_layers = 2 if spec.activation == "swiglu" else 1
        return (
            saved_bytes
            + input_bytes(readers=num_up_layers)
            + shape.tokens * ((1 + num_up_layers) * ffn + D) * shape.compute_bytes
        )
    moe = spec.moe
    (rows, F) = expert_rows(spec.moe, shape)
    shared = shape.max_local_count(moe.expert_ffn_size * moe.num_shared_experts) if moe.num_shared_experts else 0
    saved_bytes += saved_by_experts(spec, moe, shape)["weight_copies"]
    saved_bytes += (
        input_bytes(readers=3 if shared else 1) + shape.residual_tokens * moe.num_experts * shape.compute_bytes
    )
    saved_bytes += shape.tokens * (3 * shared + D) * shape.compute_bytes if shared else 0
    return saved_bytes + rows * (2 * D + 3 * F) * shape.compute_bytes

"""Bytes of a backward pass that is split into halves (`parallel.pipeline.split_backward`).

The first half saves, for every linear layer, its input, the gradient of its output, and under autocast the copy of its
weight. The second half computes the gradients of weights one by one, and frees the operands of each.

`cost.exact.activation_memory` adds them to the activations, and explains the symbols."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.cost.exact.derive.deferred import deferred_by_block
from phalanx.cost.exact.derive.weights import gradient_numbers
from phalanx.cost.exact.forward_shape import ForwardShape
from phalanx.cost.exact.head_memory import saved_by_head
from phalanx.spec.model import ModelSpec
from phalanx.spec.parts.block import Block
from phalanx.spec.parts.model import is_head_trained


def deferred_bytes(
    spec: ModelSpec, shape: ForwardShape, *, blocks: Sequence[Block], recomputed: int, last: bool
) -> list[int]:
    """Return the bytes saved between the halves, per block, and for the head of the last stage.

    Args:
        shape: Sizes of a micro-batch on one rank.
        blocks: Blocks of the stage.
        recomputed: Number of blocks, the first ones, that recompute activations.
        last: True if the stage has the head.
    """
    recomputes_norms = shape.layout.activation_checkpointing == "norms"
    sizes = [
        deferred_by_block(block, shape, recomputes_norms and index < recomputed) for index, block in enumerate(blocks)
    ]
    return [*sizes, _deferred_by_head(spec, shape)] if last else sizes


def weight_gradient_bytes(spec: ModelSpec, shape: ForwardShape, *, blocks: Sequence[Block], last: bool) -> int:
    """Return the largest temporary bytes of the second half, beyond the operands that are freed by then.

    The head comes first.

    Args:
        shape: Sizes of a micro-batch on one rank.
        blocks: Blocks of the stage.
        last: True if the stage has the head.
    """
    block_bytes = _gradient_bytes(shape, _largest_product(blocks, shape))
    if not last or shape.computes_head_gradients(spec) or not is_head_trained(spec):
        return block_bytes
    head_bytes = _gradient_bytes(shape, spec.hidden_size * shape.max_local_count(spec.vocab_size))
    return max(head_bytes, block_bytes - _deferred_by_head(spec, shape))


def widened_gradient_bytes(spec: ModelSpec, shape: ForwardShape, *, blocks: Sequence[Block], last: bool) -> int:
    """Return the largest temporary bytes while a sum of gradients becomes fp32, beyond the operands freed by then.

    They are the gradient of a weight and the new sum; the old sum is a gradient that is counted already.

    Args:
        shape: Sizes of a micro-batch on one rank.
        blocks: Blocks of the stage.
        last: True if the stage has the head, which comes first.
    """
    number_bytes = shape.compute_bytes + shape.high_precision_bytes
    largest = _largest_product(blocks, shape)
    if not last or not is_head_trained(spec):
        return number_bytes * largest
    largest = max(largest, spec.hidden_size * shape.max_local_count(spec.vocab_size))
    return number_bytes * largest - _deferred_by_head(spec, shape)


def _gradient_bytes(shape: ForwardShape, count: int) -> int:
    """Return the bytes of the gradient of `count` weights, with its cast under autocast."""
    return count * (shape.compute_bytes + (shape.residual_bytes if shape.autocast else 0))


def _largest_product(blocks: Sequence[Block], shape: ForwardShape) -> int:
    """Return the numbers of the largest weight of some blocks."""
    linears = [linear for block in set(blocks) for branch in block for linear in branch.part.linears]
    return max(gradient_numbers(linear, shape) for linear in linears)


def _deferred_by_head(spec: ModelSpec, shape: ForwardShape) -> int:
    """Return the bytes that the second half of the head's backward pass needs; in chunks the first half does all."""
    is_deferred = not shape.computes_head_gradients(spec) and is_head_trained(spec)
    return saved_by_head(spec, shape).total() if is_deferred else 0

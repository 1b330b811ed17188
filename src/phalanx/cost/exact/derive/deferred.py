"""Bytes between the halves of a backward pass that is split (`parallel.pipeline.split_backward`)."""

from __future__ import annotations

from itertools import pairwise

from phalanx.cost.exact.derive.saved import saved_inputs
from phalanx.cost.exact.derive.weights import matrix_numbers
from phalanx.cost.exact.forward_shape import ForwardShape
from phalanx.spec.parts.block import Block
from phalanx.spec.parts.operations import GroupedLinear, Linear, Magnitude, Part, Value


def deferred_by_block(block: Block, shape: ForwardShape, recomputes_norms: bool) -> int:
    """Return the bytes that the second half needs of a block's products.

    Parallel branches share the output of one norm, and the gradient of their sum unless each gathers or scales it."""
    shared_bytes = 0
    gathers_gradient = shape.tp > 1 and shape.layout.sequence_parallel
    for before, branch in pairwise(block):
        parts = (before.part, branch.part)
        stream_bytes = shape.operand_bytes(branch.part.input)
        if branch.shares_norm and (recomputes_norms or not shape.autocast):
            shared_bytes += stream_bytes if all(map(_defers_input, parts)) else 0
        last = [part.linears[-1] for part in parts]
        gathers = gathers_gradient and any(linear.role == "row" for linear in last)
        has_magnitudes = any(isinstance(part.operations[-1], Magnitude) for part in parts)
        if branch.shares_input and branch.part.kind != "experts" and not gathers and not has_magnitudes:
            shared_bytes += stream_bytes if all(linear.is_trained for linear in last) else 0
    return sum(deferred_by_part(branch.part, shape, recomputes_norms) for branch in block) - shared_bytes


def _defers_input(part: Part) -> bool:
    """Return whether a part has trained products of its input, of which nothing is dropped."""
    return any(linear.is_trained and not linear.dropout and linear.reads == (part.input,) for linear in part.linears)


def deferred_by_part(part: Part, shape: ForwardShape, recomputes_norms: bool) -> int:
    """Return the bytes that the second half needs of a part's products: inputs, gradients of outputs, copied weights.

    If the outputs of norms are recomputed, the products that read one share it."""
    inputs: dict[tuple[Value, str], int] = {}
    # Products whose outputs are added have one gradient, unless some of them gather it.
    gradients: set[int] = set()
    others = 0
    for linear in part.linears:
        if not linear.is_trained:
            continue
        (x,) = linear.reads
        if part.saved_inputs(linear) == (x,) and not linear.dropout:
            for value, reader, size in saved_inputs(part, linear, shape):
                shared = recomputes_norms and value is part.input
                inputs[value, "" if shared else reader] = size
        else:  # the output of an activation or of a dropout, which is computed again
            others += shape.operand_bytes(x)
        # The output of an adapter is added to that of what it adapts.
        written = [linear.writes, *(each.writes for each in part.linears if each.product_name == linear.adapts)]
        is_read = any(value in operation.reads for value in written for operation in part.operations)
        if is_read or linear.role == "column":
            others += output_gradient_bytes(linear, shape)
        else:
            gradients.add(output_gradient_bytes(linear, shape))
        # Products that gather one input together do without the weights.
        if shape.tp == 1 or linear.role != "column" or isinstance(linear, GroupedLinear):
            others += shape.weight_copies(matrix_numbers(linear, shape))
    return sum(inputs.values()) + sum(gradients) + others


def output_gradient_bytes(linear: Linear, shape: ForwardShape) -> int:
    """Return the bytes of the gradient of a product's output, of all tokens if tensor-parallel ranks share it."""
    y = linear.writes
    tokens = shape.tokens * y.copies if linear.role == "row" else shape.num_tokens(y)
    return tokens * shape.width(y) * shape.compute_bytes

"""Temporary bytes and weights of a part's backward pass."""

from __future__ import annotations

from phalanx.cost.exact.derive.saved import context_width
from phalanx.cost.exact.derive.weights import matrix_numbers
from phalanx.cost.exact.forward_shape import ForwardShape
from phalanx.spec.parts.operations import AttentionCore, GatherHeads, Linear, Part, ScanCore, Value
from phalanx.spec.parts.scan_segments import scan_segments


def activated_linear(part: Part) -> Linear:
    """Return the product of an MLP, or of experts, that reads an activation."""
    return next(linear for linear in part.linears if part.saved_inputs(linear) != linear.reads)


def inner_gradient_bytes(part: Part, shape: ForwardShape, splits_backward: bool) -> int:
    """Return the peak temporary bytes of an MLP or of experts, beyond freed bytes.

    They are the gradients of the inputs of the activation; with experts those of the experts' rows, before and after
    sorting. If backward passes are in two halves, the input of the last product is included, because it is not freed.
    """
    last = activated_linear(part)
    inner = activation_gradient_bytes(part, shape)
    num_saved = sum(linear.is_trained for linear in part.linears if linear.reads == last.reads)
    saved_by_halves = num_saved * shape.operand_bytes(last.reads[0]) if splits_backward else 0
    if part.kind != "experts":
        return inner + saved_by_halves
    row_bytes = shape.operand_bytes(last.writes)
    return 2 * row_bytes + inner + saved_by_halves if splits_backward else max(2 * row_bytes, inner)


def activation_gradient_bytes(part: Part, shape: ForwardShape) -> int:
    """Return the bytes of the gradients of an activation's inputs in the backward pass of the products that read it."""
    inputs = part.saved_inputs(activated_linear(part))
    return num_activations(part) * sum(map(shape.operand_bytes, inputs))


def num_activations(part: Part) -> int:
    """Return the number of products that compute the activation again: the last one, and its adapter before it."""
    return 2 if activated_linear(part).product_name in part.adapters else 1


def scan_segment_bytes(scan: ScanCore, shape: ForwardShape) -> int:
    """Return the bytes of a segment's backward pass: values of its tokens, and states between its chunks."""
    segment = max(scan_segments(shape.sequence), key=lambda segment: segment.stop - segment.start)
    widths = [
        sum(context_width(value, shape) for value in values) for values in (scan.segment_values, scan.chunk_values)
    ]
    pairs = scan.pair_values * segment.chunk * context_width(Value(scan.heads.units, scan.heads), shape)
    # Besides those of the steps, there are the first state of the row, and the gradients of two.
    states = (segment.chunks + 2) * context_width(scan.state, shape)
    numbers = segment.chunk * (segment.chunks * (widths[0] + pairs) + widths[1]) + states
    return shape.batch * numbers // shape.layout.cp * shape.high_precision_bytes


def fp8_cast_bytes(part: Part, shape: ForwardShape) -> int:
    """Return the temporary bytes of the casts for the input gradient of a block's last product; 0 without float8.

    A CPU, which emulates the product, also has the numbers that the casts represent."""
    if shape.precision != "fp8":
        return 0
    last = activated_linear(part)
    tokens = shape.num_tokens(last.reads[0])
    count = tokens * last.writes.width + matrix_numbers(last, shape)
    return count * (1 if shape.on_cuda else 1 + shape.compute_bytes)


def attention_exchange_bytes(part: Part, shape: ForwardShape) -> int:
    """Return the bytes of communication inside attention.

    Ring attention has keys, values and their gradients, two of each (one in transit). Ulysses has the input and output
    of an all-to-all of queries, keys and values. Ranks with columns of heads have received queries and keys,
    contiguous, and with their gradients in transit."""
    gathers = (operation for operation in part.operations if isinstance(operation, GatherHeads))
    exchanged_bytes = sum(2 * shape.operand_bytes(gather.writes) for gather in gathers)
    if shape.layout.cp == 1:
        return exchanged_bytes
    (core,) = part.cores
    if shape.layout.cp_method == "ring" and isinstance(core, AttentionCore):
        _, *keys_and_values, _ = core.keeps
        numbers = sum(map(shape.width, keys_and_values))
        number_bytes = 2 * (shape.compute_bytes + shape.high_precision_bytes)
        return exchanged_bytes + number_bytes * numbers * shape.tokens
    numbers = sum(context_width(value, shape) for value in core.reads)
    return exchanged_bytes + shape.compute_bytes * 2 * numbers * shape.tokens

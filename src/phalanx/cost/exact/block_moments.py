"""Times in the backward pass of a block at which memory can peak: what exists in addition to what the block has saved.

Inner gradients, communication and gradients of weights exist one after the other, while saved tensors are freed. These
are the moments on a CPU. CUDA's only moment is the largest inner gradients, to which `comm_buffers` adds an estimate of
all communication.

`cost.exact.activation_memory` explains the symbols."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from phalanx.cost.exact.derive.saved import (
    gated_norm_bytes,
    kept_by_core,
    norm_bytes,
    norm_output_bytes,
    shared_output_bytes,
)
from phalanx.cost.exact.derive.temporary import (
    activated_linear,
    activation_gradient_bytes,
    attention_exchange_bytes,
    fp8_cast_bytes,
    inner_gradient_bytes,
    scan_segment_bytes,
)
from phalanx.cost.exact.derive.weights import dequantized_bytes, expert_gradients, gradient_numbers, part_gradients
from phalanx.cost.exact.forward_shape import ForwardShape
from phalanx.spec.parts.block import Block
from phalanx.spec.parts.operations import (
    Combine,
    Core,
    Dispatch,
    Gate,
    GatedNorm,
    Linear,
    Magnitude,
    Norm,
    Part,
    ScanCore,
)


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


SavedByPart = Mapping[Part, Counter[str]]
NO_GRADIENTS = WeightGradients()


def largest_moment(moments: Iterable[BlockMoment], gradients: WeightGradients) -> int:
    """Return the maximum of the bytes of some moments; 0 without any."""
    return max(
        (
            moment.temporary
            + moment.exchanged
            + gradients.own * moment.own_weights
            + gradients.block * moment.block_weights
            for moment in moments
        ),
        default=0,
    )


@dataclass(frozen=True, kw_only=True)
class BlockMoments:
    """Moments of a block, in their order."""

    mlp: tuple[BlockMoment, ...]
    attention: tuple[BlockMoment, ...] = ()


def block_moments(
    block: Block, shape: ForwardShape, *, saved_by: SavedByPart, output_gradient: int, splits_backward: bool
) -> BlockMoments:
    """Return the moments of a block.

    Args:
        block: Branches of the block.
        shape: Sizes of a micro-batch on one rank.
        saved_by: Bytes that each part saves.
        output_gradient: Bytes of the gradient of the block's output, unless another number contains it.
        splits_backward: True if the gradients of weights are deferred, with their operands.
    """
    mixers = [branch.part for branch in block if branch.part.kind == "attention"]
    ffn_branches = [branch for branch in block if branch.part.kind in ("mlp", "experts")]
    ffns = [branch.part for branch in ffn_branches]
    is_parallel = len(mixers) == 1 and bool(ffns) and ffn_branches[0].shares_input
    if shape.on_cuda:
        inner_bytes = [inner_gradient_bytes(ffn, shape, splits_backward) + fp8_cast_bytes(ffn, shape) for ffn in ffns]
        # A mixer's inner gradients are smaller than those of an MLP.
        inner_bytes = inner_bytes or [_kernel_bytes(mixer.cores[0], shape) for mixer in mixers]
        return BlockMoments(mlp=(BlockMoment(temporary=max(inner_bytes) + output_gradient),))
    stream_bytes = shape.value_bytes(block[0].part.input)
    other_gradients = 0
    gathers_gradient = shape.tp > 1 and shape.layout.sequence_parallel
    mlp: list[BlockMoment] = []
    freed = FreedBefore()
    for branch in reversed(ffn_branches):
        ffn = branch.part
        # The gradient of a norm's input takes the place of that input, until it is gathered or sorted by expert.
        is_replaced = gathers_gradient or ffn.kind == "experts"
        freed_norm = stream_bytes if is_replaced and branch.after else 0
        ffn_moments = _expert_moments if ffn.kind == "experts" else _dense_mlp_moments
        for moment in ffn_moments(ffn, shape, splits_backward=splits_backward):
            temporary = moment.temporary + other_gradients - freed.saved - freed_norm
            block_weights = moment.block_weights + freed.weights
            mlp.append(replace(moment, temporary=temporary, block_weights=block_weights))
        # The next branch of the same input adds to the gradient that this one leaves for it.
        other_gradients += stream_bytes if branch.shares_input else 0
        # The mixer still needs the output of a norm that both read.
        kept_bytes = shared_output_bytes(block, branch, shape)
        if ffn.name == "per_layer":
            # The gradient of what is given to the layer waits, and the input of the norm after it is freed.
            given = (value for value in ffn.saved_inputs(activated_linear(ffn)) if value.is_given)
            kept_bytes += sum(map(shape.operand_bytes, given)) - stream_bytes
        freed = FreedBefore(freed.saved + saved_by[ffn].total() - kept_bytes, freed.weights + _ffn_weights(ffn, shape))
    attention: list[BlockMoment] = []
    other_gradients = stream_bytes if is_parallel else 0
    for branch in reversed([branch for branch in block if branch.part.kind == "attention"]):
        mixer = branch.part
        for moment in _attention_moments(mixer, freed, shape, saved_by=saved_by):
            attention.append(replace(moment, temporary=moment.temporary + other_gradients))
        # A mixer parallel to attention leaves a gradient of the norm's output, which attention still needs.
        other_gradients += stream_bytes
        freed_bytes = saved_by[mixer].total() - shared_output_bytes(block, branch, shape)
        freed = FreedBefore(freed.saved + freed_bytes, freed.weights + part_gradients(mixer, shape))
    if block[-1].scale != 1 and not gathers_gradient:  # the gradient of what is added differs from that of the stream
        output_gradient += stream_bytes
    if replaces_output_gradient(block):
        output_gradient += stream_bytes
    return BlockMoments(
        mlp=tuple(_moment_of_pass(moment, output_gradient, splits_backward) for moment in mlp),
        attention=tuple(_moment_of_pass(moment, output_gradient, splits_backward) for moment in attention),
    )


def replaces_output_gradient(block: Block) -> bool:
    """Return whether the first operations of the backward pass have another gradient of the residual stream.

    It is that of its product with a constant, or a sum with the gradient of a branch after the MLP."""
    return block[-1].scales_stream or block[-1].part.name == "per_layer"


class FreedBefore(NamedTuple):
    """Totals of the branches of a block that have run backward."""

    saved: int = 0
    """Bytes of saved tensors, which are freed."""
    weights: int = 0
    """Numbers of weights that have gradients."""


def _ffn_weights(ffn: Part, shape: ForwardShape) -> int:
    """Return the number of weights of an MLP or of experts that have gradients before those of attention."""
    if ffn.kind != "experts":
        return part_gradients(ffn, shape)
    # Those of router and shared experts are few, and left out.
    return expert_gradients(ffn, shape) if shape.layout.ep == 1 else 0


def _moment_of_pass(moment: BlockMoment, output_gradient: int, splits_backward: bool) -> BlockMoment:
    """Return the moment with the gradient of the block's output, and without gradients of weights that are deferred."""
    moment = replace(moment, temporary=moment.temporary + output_gradient)
    return replace(moment, own_weights=0, block_weights=0) if splits_backward else moment


def _dense_mlp_moments(part: Part, shape: ForwardShape, splits_backward: bool) -> tuple[BlockMoment, ...]:
    """Return the moments of the last product, with the activation, and of the first products."""
    last = activated_linear(part)
    inner_gradients = inner_gradient_bytes(part, shape, splits_backward=splits_backward)
    if last.role == "copied":
        size = inner_gradients + shape.operand_bytes(part.input) + dequantized_bytes(part.linears, shape)
        return (BlockMoment(temporary=size),)
    activation_inputs = sum(map(shape.operand_bytes, part.saved_inputs(last)))
    gathered_gradient = _all_tokens_bytes(part, shape)
    first = [linear for linear in part.linears if linear is not last]
    first_weights = [gradient_numbers(linear, shape) for linear in first]
    last_weights = gradient_numbers(last, shape)
    return (
        BlockMoment(
            temporary=inner_gradients + fp8_cast_bytes(part, shape) + dequantized_bytes([last], shape),
            exchanged=gathered_gradient,
            own_weights=last_weights,
            block_weights=last_weights,
        ),
        BlockMoment(
            temporary=inner_gradients
            - activation_inputs
            + _input_gradient_bytes(part, shape)
            + dequantized_bytes(first, shape),
            exchanged=_input_exchange_bytes(part, shape, splits_backward)
            + (gathered_gradient if splits_backward else 0),
            own_weights=sum(first_weights) if shape.tp > 1 else max(first_weights),
            block_weights=sum(first_weights) + last_weights,
        ),
    )


def _expert_moments(part: Part, shape: ForwardShape, splits_backward: bool) -> tuple[BlockMoment, ...]:
    """Return the moments of the weighted sum of the outputs, of the last product, and of the first products."""
    if splits_backward:
        temporary = inner_gradient_bytes(part, shape, splits_backward=splits_backward) + fp8_cast_bytes(part, shape)
        return (BlockMoment(temporary=temporary + dequantized_bytes(part.linears, shape)),)
    last = activated_linear(part)
    row_bytes = shape.operand_bytes(last.writes)
    inner_bytes = activation_gradient_bytes(part, shape)
    last_weights = gradient_numbers(last, shape)
    gathered_gradient = _all_tokens_bytes(part, shape) if shape.layout.ep == 1 else 0
    weighs_inputs = any(isinstance(operation, Dispatch) and operation.weighs for operation in part.operations)
    # Outputs of experts are freed first, copies of tokens that are multiplied by weights last.
    freed_bytes = 0 if weighs_inputs else row_bytes
    # A product after the experts has freed its input.
    of_latent = [linear.reads[0] for linear in part.linears if isinstance(part.writer(linear.reads[0]), Combine)]
    freed_latent = sum(map(shape.operand_bytes, of_latent))
    # With expert parallelism, shared experts compute while rows are sent, so their backward pass comes last.
    shared = part.within("shared") if shape.layout.ep == 1 else None
    shared_moments: tuple[BlockMoment, ...] = ()
    after_shared = 0
    if shared and shared.linears:
        shared_moments = _dense_mlp_moments(shared, shape, splits_backward)
        shared_inputs = sum(map(shape.operand_bytes, shared.saved_inputs(activated_linear(shared))))
        gates = (operation for operation in part.operations if isinstance(operation, Gate))
        gated_outputs = sum(shape.operand_bytes(gate.reads[0]) for gate in gates)
        after_shared = shape.value_bytes(part.input) - shared_inputs - gated_outputs
    expert_moments = (
        BlockMoment(temporary=2 * row_bytes, exchanged=gathered_gradient),
        # The outputs are freed. The gradients of their rows are sorted, sent and received.
        *([BlockMoment(temporary=-freed_bytes, exchanged=3 * row_bytes)] if shape.layout.ep > 1 else []),
        BlockMoment(
            # The gradients of the rows have replaced the outputs.
            temporary=inner_bytes
            + row_bytes
            - freed_bytes
            + fp8_cast_bytes(part, shape)
            + dequantized_bytes([last], shape),
            own_weights=last_weights,
            block_weights=last_weights,
        ),
        BlockMoment(
            # The gradients of the activation's inputs have replaced these, and two of the rows the outputs.
            temporary=2 * row_bytes - freed_bytes + dequantized_bytes(part.linears, shape),
            own_weights=last_weights,
            block_weights=expert_gradients(part, shape),
        ),
    )
    return *shared_moments, *(
        replace(moment, temporary=moment.temporary + after_shared - freed_latent) for moment in expert_moments
    )


def _attention_moments(
    attention: Part, freed: FreedBefore, shape: ForwardShape, saved_by: SavedByPart
) -> tuple[BlockMoment, ...]:
    """Return the moments of the kernel of attention, or of another mixer, and of the products before it."""
    (core,) = attention.cores
    first = [linear for linear in attention.linears if linear.role == "column"]
    first_weights = [gradient_numbers(linear, shape) for linear in first]
    head_gradients = _head_gradient_bytes(core, shape)
    weights = part_gradients(attention, shape)
    gate_gradients, freed_after_kernel = _after_kernel_bytes(attention, core, shape)
    kernel_bytes = gate_gradients - freed_after_kernel + _kernel_bytes(core, shape)
    # Tensor-parallel products need their input, a norm's output, until the gradients of all weights are computed.
    input_bytes = norm_output_bytes(attention, shape) if shape.tp > 1 else 0
    exchange_bytes = attention_exchange_bytes(attention, shape)
    # Ulysses exchanges the gradients of heads after the kernel; other exchanges are under way while it computes.
    exchanges_later = shape.layout.cp > 1 and shape.layout.cp_method == "ulysses"
    kept_bytes = sum(kept_by_core(core, shape).values())
    exchange = BlockMoment(
        temporary=gate_gradients - freed_after_kernel - kept_bytes - freed.saved, exchanged=exchange_bytes
    )
    return (
        BlockMoment(
            temporary=kernel_bytes - freed.saved,
            exchanged=0 if exchanges_later else exchange_bytes,
            block_weights=freed.weights + weights - sum(first_weights),
        ),
        *([exchange] if exchanges_later else []),
        BlockMoment(
            temporary=head_gradients
            + gate_gradients
            + _input_gradient_bytes(attention, shape)
            + input_bytes
            + dequantized_bytes(first, shape)
            - saved_by[attention][attention.kind]
            - freed.saved,
            exchanged=_input_exchange_bytes(attention, shape, splits_backward=False),
            own_weights=sum(first_weights) if shape.tp > 1 else max(first_weights),
            block_weights=freed.weights + weights,
        ),
    )


def _head_gradient_bytes(core: Core, shape: ForwardShape) -> int:
    """Return the bytes of the gradients of what the kernel of a mixer reads.

    Of gathered heads, a rank has gradients of its own."""
    used = [value if value.cut and value.cut.share == "units" else core.writes for value in core.reads]
    return sum(map(shape.operand_bytes, used))


def _kernel_bytes(core: Core, shape: ForwardShape) -> int:
    """Return the bytes of gradients and of other values in the backward pass of a mixer's kernel."""
    gradient_bytes = _head_gradient_bytes(core, shape) + shape.operand_bytes(core.writes)
    kernel_bytes = max(gradient_bytes, sum(map(shape.value_bytes, core.backward_values)))
    return kernel_bytes + (scan_segment_bytes(core, shape) if isinstance(core, ScanCore) else 0)


def _after_kernel_bytes(part: Part, core: Core, shape: ForwardShape) -> tuple[int, int]:
    """Return the bytes of the gradients of gates of a kernel's output, and of what operations after it have saved.

    The former exist during its backward pass, the latter do not any more."""
    gate_bytes = saved_bytes = 0
    for operation in part.operations[part.operations.index(core) + 1 :]:
        if isinstance(operation, GatedNorm):
            saved_bytes += gated_norm_bytes(operation, shape)
            gate_bytes += shape.operand_bytes(operation.reads[1])
        elif isinstance(operation, Norm):
            saved_bytes += norm_bytes(operation, shape)
        elif isinstance(operation, Magnitude):
            saved_bytes += shape.operand_bytes(operation.writes)
        elif isinstance(operation, Linear) and operation.role == "row":
            values = [value for value in part.saved_inputs(operation) if (value.view_of or value) not in core.keeps]
            saved_bytes += sum(map(shape.operand_bytes, values))
            gates = [value for value in values if isinstance(part.writer(value), Linear)]
            gate_bytes += sum(map(shape.operand_bytes, gates))
    return gate_bytes, saved_bytes


def _all_tokens_bytes(part: Part, shape: ForwardShape) -> int:
    """Return the bytes of the residual stream's tokens that tensor-parallel ranks gather; 0 if they have all."""
    is_gathered = shape.tp > 1 and shape.layout.sequence_parallel
    return shape.tokens * part.input.width * shape.compute_bytes if is_gathered else 0


def _input_gradient_bytes(part: Part, shape: ForwardShape) -> int:
    """Return the bytes of the gradient of what products of a norm's output read, and with `norms` of that output.

    Tensor-parallel ranks have terms of the gradient, which are in `_input_exchange_bytes`."""
    stream_bytes = shape.residual_tokens * part.input.width * shape.residual_bytes
    norm_bytes = stream_bytes if shape.layout.activation_checkpointing == "norms" else 0
    return norm_bytes + (shape.tokens * part.input.width * shape.compute_bytes if shape.tp == 1 else 0)


def _input_exchange_bytes(part: Part, shape: ForwardShape, splits_backward: bool) -> int:
    """Return the bytes of tensor-parallel communication where products read a norm's output.

    Ranks have a gathered input, unless gradients of weights are deferred or none are computed, and a term of the sum
    before and after the exchange. Without sequence parallelism they have a sum and its copy."""
    if shape.tp == 1:
        return 0
    all_tokens_bytes = shape.tokens * part.input.width * shape.compute_bytes
    if not shape.layout.sequence_parallel:
        return 2 * all_tokens_bytes
    readers = (linear for linear in part.linears if linear.role == "column" and linear.reads == (part.input,))
    num_gathered = int(not splits_backward and any(linear.is_trained for linear in readers))
    num_copies = 1 if shape.batch == 1 else 2  # tokens of several sequences are ordered by rank for the exchange
    sum_bytes = shape.residual_tokens * part.input.width * shape.residual_bytes
    return (num_copies * (num_gathered + 1) + 1) * all_tokens_bytes + sum_bytes

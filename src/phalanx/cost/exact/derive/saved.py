"""Bytes that a part's forward pass saves for the backward pass.

Tensors are counted by their memory: one that several operations read counts once, and a view as its whole tensor.
`cost.exact.activation_memory` sums them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace

from phalanx.cost.exact.derive.weights import matrix_numbers
from phalanx.cost.exact.forward_shape import INDEX_BYTES, STATISTIC_BYTES, ForwardShape
from phalanx.spec.model import ModelSpec
from phalanx.spec.parts.block import Block, Branch
from phalanx.spec.parts.operations import (
    AttentionCore,
    Clip,
    Combine,
    Core,
    Dispatch,
    Gate,
    GatedNorm,
    GroupedLinear,
    LayerInputs,
    Linear,
    Magnitude,
    Norm,
    Part,
    Route,
    ScanCore,
    Value,
)
from phalanx.spec.parts.scan_segments import scan_segments

Memory = tuple[Value, str]
"""Key of a tensor: its value, and the reader for which it is copied."""


def saved_by_part(spec: ModelSpec, part: Part, shape: ForwardShape) -> Counter[str]:
    """Return the bytes that a part saves, under its kind, and the copies of weights."""
    tensors: dict[Memory, int] = {}
    other_bytes = copied_weights = 0
    normalized = set[Value]()
    for operation in part.operations:
        match operation:
            case Linear():
                tensors |= {(value, reader): size for value, reader, size in saved_inputs(part, operation, shape)}
                copied_weights += 0 if operation.matrix.is_quantized else matrix_numbers(operation, shape)
                if isinstance(operation, GroupedLinear) and operation.bias:
                    tensors[part.input, "experts of rows"] = shape.num_tokens(operation.writes) * INDEX_BYTES
            case Magnitude(writes=y):
                tensors[y, ""] = shape.operand_bytes(y)
                other_bytes += shape.width(y) * shape.high_precision_bytes
            case GatedNorm(reads=values):
                tensors |= {(value, ""): shape.operand_bytes(value) for value in values}
                other_bytes += _num_vectors(operation, shape) * shape.high_precision_bytes
            case Norm():
                (x,) = operation.reads
                # The norm before the part saves the residual stream, too.
                is_stream = part.kind != "merge" and x.numbers == "residual" and part.writer(x) is None
                is_saved = is_stream or x in normalized
                other_bytes += norm_bytes(operation, shape) - (shape.value_bytes(x) if is_saved else 0)
                normalized.add(x)
                copied_weights += _copied_scales(operation, shape)
            case Clip(reads=values):
                tensors |= {(value, ""): shape.operand_bytes(value) for value in values}
            case Core():
                tensors |= kept_by_core(operation, shape)
                if isinstance(operation, AttentionCore):
                    other_bytes += _softmax_bytes(spec, operation, shape)
            case Route():
                other_bytes += _router_bytes(operation, shape)
            case Gate(reads=(value, logit)):
                tensors[value, ""] = shape.operand_bytes(value)
                other_bytes += shape.operand_bytes(logit)
            case Dispatch(writes=rows, weighs=True):
                # Copies before they are multiplied are counted as outputs of experts, which are not kept then.
                other_bytes += shape.num_tokens(rows) * INDEX_BYTES
            case Combine():
                other_bytes += _weighted_sum_bytes(operation, shape)
            case LayerInputs(writes=inputs):
                tensors[inputs, ""] = shape.operand_bytes(inputs)
    saved: Counter[str] = Counter({part.kind: sum(tensors.values()) + other_bytes})
    saved["weight_copies"] = shape.weight_copies(copied_weights)
    return saved


def saved_inputs(part: Part, linear: Linear, shape: ForwardShape) -> Iterator[tuple[Value, str, int]]:
    """Yield the values that a product saves, the reader for which autocast copies them, and their bytes.

    Autocast casts the residual stream for each product, but once for those that gather it together. What is given to
    the part is kept elsewhere. A frozen product saves the inputs of its activation only."""
    saved = part.saved_inputs(linear)
    if not linear.is_trained and saved == linear.reads:
        return
    for value in saved:
        if value.is_given:
            continue
        reader = ""
        if shape.autocast and value.numbers == "residual":
            reader = "column" if shape.tp > 1 and linear.role == "column" else linear.name
        yield value.view_of or value, reader, shape.operand_bytes(value.view_of or value)


def saved_by_expert_rows(part: Part, shape: ForwardShape) -> int:
    """Return the bytes that experts save for their rows: inputs, those of the activation, and weighted outputs."""
    inputs = {
        value: size
        for linear in part.linears
        if isinstance(linear, GroupedLinear)
        for value, _, size in saved_inputs(part, linear, shape)
    }
    sums = (operation for operation in part.operations if isinstance(operation, Combine))
    return sum(inputs.values()) + sum(_weighted_sum_bytes(operation, shape) for operation in sums)


def norm_output_bytes(part: Part, shape: ForwardShape) -> int:
    """Return the part of a part's saved bytes that is its input, which a norm has written."""
    tensors = {
        reader: size
        for linear in part.linears
        for value, reader, size in saved_inputs(part, linear, shape)
        if value is part.input
    }
    return sum(tensors.values())


def branch_norm_bytes(branch: Branch, shape: ForwardShape) -> int:
    """Return what the norms of a branch save. Branches of one input save it once."""
    shared_bytes = shape.value_bytes(branch.before.reads[0]) if branch.shares_input and branch.before else 0
    return sum(norm_bytes(norm, shape) for norm in branch.norms) - shared_bytes


def shared_output_bytes(block: Block, branch: Branch, shape: ForwardShape) -> int:
    """Return what a branch saves of a norm's output that the branch before saves too, unless autocast copies it."""
    if not branch.shares_norm or shape.autocast:
        return 0
    before = block[block.index(branch) - 1]
    return min(norm_output_bytes(each.part, shape) for each in (before, branch))


def norm_bytes(norm: Norm, shape: ForwardShape) -> int:
    """Return the bytes that a norm saves: its input and a statistic of each vector."""
    (x,) = norm.reads
    number_bytes = shape.number_bytes(x)
    if norm.has_offset:
        width = shape.width(x) if norm.crosses_ranks else norm.width
        return width * shape.high_precision_bytes + norm_bytes(replace(norm, has_offset=False), shape)
    if norm.crosses_ranks and shape.tp > 1:  # by single operations
        is_frozen = any(parameter.is_frozen for parameter in norm.parameters.values())
        inputs = shape.width(x) * (shape.high_precision_bytes + (0 if is_frozen else shape.compute_bytes))
        return shape.num_tokens(x) * (inputs + shape.high_precision_bytes)
    vectors = _num_vectors(norm, shape)
    if norm.kind == "layernorm":  # mean and 1 / std, on a CPU in the precision of the scale
        statistic_bytes = STATISTIC_BYTES if shape.on_cuda else shape.residual_bytes
        return shape.value_bytes(x) + 2 * vectors * statistic_bytes
    return shape.value_bytes(x) + vectors * max(STATISTIC_BYTES, number_bytes)


def gated_norm_bytes(norm: GatedNorm, shape: ForwardShape) -> int:
    """Return the bytes that a norm of a gated value saves: both, and a statistic of each vector."""
    return sum(map(shape.operand_bytes, norm.reads)) + _num_vectors(norm, shape) * shape.high_precision_bytes


def _num_vectors(norm: Norm, shape: ForwardShape) -> int:
    """Return the number of vectors of a norm on this rank, which may have a part of each."""
    (x, *_) = norm.reads
    return shape.num_tokens(x) * max(1, shape.width(x) // norm.width)


def _copied_scales(norm: Norm, shape: ForwardShape) -> int:
    """Return the numbers of a norm's scale that are cast to the precision of products."""
    if norm.crosses_ranks and shape.tp > 1:
        return shape.width(norm.reads[0])
    return norm.width if shape.on_cuda and norm.parameters and norm.kind != "head_layernorm" else 0


def kept_by_core(core: Core, shape: ForwardShape) -> Mapping[Memory, int]:
    """Return what the kernel of a mixer saves, without keys and values that another layer has saved.

    With context parallelism these are copies, in Ulysses of other heads. What Ulysses has received is one tensor, which
    is saved if a part of it is."""
    cp = shape.layout.cp
    is_ulysses = cp > 1 and shape.layout.cp_method == "ulysses"
    kept = {
        (value, "core" if cp > 1 else ""): shape.tokens * context_width(value, shape) * shape.number_bytes(value)
        for value in ((*core.reads, *core.keeps) if is_ulysses else core.keeps)
        if cp > 1 or not value.is_given
    }
    return kept | {(core.state, ""): state_bytes(core, shape)} if isinstance(core, ScanCore) else kept


def state_bytes(scan: ScanCore, shape: ForwardShape) -> int:
    """Return the bytes of the states that a scan saves: before each segment of a row but the first."""
    num_states = shape.batch * (len(scan_segments(shape.sequence)) - 1)
    return num_states * context_width(scan.state, shape) // shape.layout.cp * shape.number_bytes(scan.state)


def _softmax_bytes(spec: ModelSpec, core: AttentionCore, shape: ForwardShape) -> int:
    """Return the log-sum-exps that attention saves, and its mask of documents unless it computes by document."""
    has_mask = shape.has_dense_mask(spec, core.heads.unit, core.chunk)
    mask_bytes = shape.batch * shape.sequence**2 * shape.compute_bytes if has_mask else 0
    return mask_bytes + shape.tokens * core.heads.units_on_rank(shape.tp) * shape.high_precision_bytes


def context_width(value: Value, shape: ForwardShape) -> int:
    """Return the numbers per token of heads in attention: Ulysses repeats heads that are fewer than the ranks."""
    assert value.cut
    units = value.cut.units_on_rank(shape.tp)
    is_ulysses = shape.layout.cp > 1 and shape.layout.cp_method == "ulysses"
    return value.cut.unit * (max(units, shape.layout.cp) if is_ulysses else units)


def _weighted_sum_bytes(combine: Combine, shape: ForwardShape) -> int:
    """Return what the weighted sum of experts saves: the outputs for all rows, and their weights."""
    rows, _ = combine.reads
    return shape.operand_bytes(rows) + shape.num_tokens(rows) * shape.compute_bytes


def _router_bytes(route: Route, shape: ForwardShape) -> int:
    """Return what a router saves after its product, and the orders in which rows are gathered and returned."""
    high = shape.high_precision_bytes
    tokens = shape.residual_tokens
    # z-loss: logits and logsumexp; softmax or sigmoid: scores.
    saved_bytes = tokens * (2 * route.num_experts + 1) * high
    # Balance loss: sums of scores.
    saved_bytes += tokens * high if route.score == "sigmoid" else 0
    # Selected scores and their sums.
    saved_bytes += tokens * (route.top_k + 1) * high if route.normalizes else 0
    # Factors of experts, and what they multiply.
    saved_bytes += 2 * tokens * route.top_k * high if route.parameters else 0
    # Balance loss: fractions of tokens.
    saved_bytes += (shape.batch if route.balances_sequences else 1) * route.num_experts * high
    has_whole_experts = shape.layout.ep > 1
    rows = (tokens if has_whole_experts else shape.tokens) * route.top_k
    # Selected experts; sorting by expert, and back; the same for received rows.
    saved_bytes += (tokens * route.top_k + (4 if has_whole_experts else 2) * rows) * INDEX_BYTES
    return saved_bytes

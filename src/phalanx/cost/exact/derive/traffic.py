"""Messages of a part between tensor-, context- and expert-parallel ranks, of a micro-batch.

Symbols: N tokens of a micro-batch, of which sequence parallelism leaves a share on each rank between pairs of products;
D width; tp, cp, ep the number of tensor-, context- and expert-parallel ranks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from phalanx.cost.exact.derive.saved import context_width
from phalanx.cost.exact.forward_shape import INDEX_BYTES, ForwardShape
from phalanx.cost.formulas.collectives import Collective, Traffic, sent_bytes
from phalanx.spec.communication_groups import GroupKind
from phalanx.spec.parts.operations import (
    AttentionCore,
    Combine,
    Core,
    Dispatch,
    GatherHeads,
    GatherTokens,
    GroupedLinear,
    Linear,
    Magnitude,
    Norm,
    Operation,
    Part,
    Route,
    Value,
)

TrafficRows = list[Traffic]
TENSOR_PARALLEL_PURPOSE = "activations and their gradients, in matrix products that ranks share"
CONTEXT_PARALLEL_PURPOSE = "keys and values, or tokens for heads, and their gradients"
EXPERT_PARALLEL_PURPOSE = "tokens to their experts and back, and their gradients"
ROW_NORMS_PURPOSE = "norms of the rows of adapted weights"
SCALARS_PURPOSE = "numbers of each token, for losses and norms; choices of experts"


class PassTraffic(NamedTuple):
    """Traffic of the forward pass, of its recomputation, and of the backward pass."""

    forward: TrafficRows
    recompute: TrafficRows
    backward: TrafficRows


def part_traffic(part: Part, shape: ForwardShape) -> PassTraffic:
    """Return the traffic of a rank in a part, with balanced experts."""
    traffic = PassTraffic([], [], [])
    for operation in part.operations:
        forward, backward = _operation_traffic(part, operation, shape)
        traffic.forward.extend(forward)
        traffic.backward.extend(backward)
        # Nothing after the last sum over experts is saved, so it is not recomputed.
        ends = operation is part.operations[-1] and isinstance(operation, Combine) and shape.layout.ep == 1
        traffic.recompute.extend([] if ends else forward)
    return traffic


def inference_traffic(part: Part, shape: ForwardShape) -> TrafficRows:
    """Return the traffic of a rank in a part without gradients, for which routers count no choices."""
    operations = (operation for operation in part.operations if not isinstance(operation, Route))
    return [row for operation in operations for row in _operation_traffic(part, operation, shape)[0]]


def _operation_traffic(part: Part, operation: Operation, shape: ForwardShape) -> tuple[TrafficRows, TrafficRows]:
    """Return the forward and backward traffic of an operation."""
    tp = shape.tp
    match operation:
        case GroupedLinear():
            return [], []
        case Linear(reads=(x,)) if operation.role == "column":
            if operation is not part.first_reader(x):
                return [], []
            readers = (linear for linear in part.linears if linear.role == "column" and linear.reads == (x,))
            return _column_traffic(x, shape, has_trained=any(linear.is_trained for linear in readers))
        case Linear() if operation.role == "row":
            size = _all_tokens_bytes(operation.writes, shape)
            return tp_reduce(shape, size), tp_gather(shape, size)
        case Magnitude(writes=y) if operation.crosses_ranks:
            size = y.width * shape.high_precision_bytes
            return collective_traffic("all_reduce", size, tp, ROW_NORMS_PURPOSE, "tp"), []
        case Norm() if operation.crosses_ranks:
            sums = collective_traffic(
                "all_reduce", shape.tokens * shape.high_precision_bytes, tp, SCALARS_PURPOSE, "tp"
            )
            return sums, sums
        case GatherTokens(reads=(x,)):
            size = _all_tokens_bytes(x, shape)
            return tp_gather(shape, size), tp_reduce(shape, size)
        case GatherHeads():
            size = shape.operand_bytes(operation.writes)
            gather, scatter = (
                collective_traffic(collective, size, tp, TENSOR_PARALLEL_PURPOSE, "tp")
                for collective in ("all_gather", "reduce_scatter")
            )
            return gather, scatter
        case AttentionCore() if shape.layout.cp > 1 and shape.layout.cp_method == "ring":
            return _ring_traffic(operation, shape)
        case Core() if shape.layout.cp > 1:
            return _ulysses_traffic(operation, shape)
        case Route():
            counts = shape.batch * operation.num_experts * shape.high_precision_bytes
            shares_tokens = tp if shape.layout.sequence_parallel else 1
            sums = collective_traffic("all_reduce", counts, shares_tokens, SCALARS_PURPOSE, "tp")
            return sums + collective_traffic("all_reduce", counts, shape.layout.cp, SCALARS_PURPOSE, "cp"), []
        case Dispatch():
            return _dispatch_traffic(operation, shape)
        case Combine(reads=(rows, _)):
            if shape.layout.ep > 1:
                exchange = _exchange_rows(rows, shape)
                return exchange, exchange
            size = _all_tokens_bytes(operation.writes, shape)
            return tp_reduce(shape, size), tp_gather(shape, size)
    return [], []


def _column_traffic(x: Value, shape: ForwardShape, has_trained: bool) -> tuple[TrafficRows, TrafficRows]:
    """Return the traffic of the products that read a value together.

    In a pair with a row-parallel product, one all-reduce follows, and in backward one precedes (arXiv 1909.08053,
    section 3). With sequence parallelism each pass has a gather and a scatter, and backward gathers the saved input
    again (arXiv 2205.05198, section 4.2.2), unless all their matrices are frozen.
    """
    size = _all_tokens_bytes(x, shape)
    gathered_again = tp_gather(shape, size) if has_trained else []
    return tp_gather(shape, size), gathered_again + tp_reduce(shape, size)


def _ring_traffic(core: AttentionCore, shape: ForwardShape) -> tuple[TrafficRows, TrafficRows]:
    """Return the traffic of ring attention (arXiv 2310.01889).

    Keys and values visit all other ranks. In backward they do so again, and their gradients take one more step to
    return to their rank.
    """
    cp = shape.layout.cp
    _, *keys_and_values, _ = core.keeps
    numbers = sum(shape.tokens * shape.width(value) for value in keys_and_values)
    size = (cp - 1) * numbers * shape.compute_bytes
    gradient_bytes = cp * numbers * shape.high_precision_bytes
    send = Traffic(operation="send", bytes=size, purpose=CONTEXT_PARALLEL_PURPOSE, group_kind="cp", calls=cp - 1)
    return [send], [replace(send, bytes=size + gradient_bytes, calls=2 * cp - 1)]


def _ulysses_traffic(core: Core, shape: ForwardShape) -> tuple[TrafficRows, TrafficRows]:
    """Return the traffic of DeepSpeed-Ulysses (arXiv 2309.14509).

    Both passes exchange queries, keys, values and the output. If there are more ranks than key/value heads, ranks get
    copies of these heads.
    """
    rows: TrafficRows = []
    for values in (core.reads, (core.writes,)):
        size = shape.tokens * sum(context_width(value, shape) for value in values) * shape.compute_bytes
        rows += collective_traffic("all_to_all", size, shape.layout.cp, CONTEXT_PARALLEL_PURPOSE, "cp")
    return rows, rows


def _dispatch_traffic(dispatch: Dispatch, shape: ForwardShape) -> tuple[TrafficRows, TrafficRows]:
    """Return the traffic of tokens on their way to experts.

    With expert parallelism it is an all-to-all in each pass, and forward one more of counts (GShard, arXiv 2006.16668,
    section 3.2). If ranks share each expert's columns, tokens, choices and their weights are gathered.
    """
    x, weights = dispatch.reads
    if shape.layout.ep > 1:
        counts = dispatch.num_experts * INDEX_BYTES
        exchange = _exchange_rows(dispatch.writes, shape)
        return collective_traffic("all_to_all", counts, shape.layout.ep, SCALARS_PURPOSE, "ep") + exchange, exchange
    token_bytes = _all_tokens_bytes(x, shape)
    weight_bytes = shape.tokens * weights.width * shape.high_precision_bytes
    choice_bytes = shape.tokens * weights.width * INDEX_BYTES
    forward = [row for size in (token_bytes, weight_bytes, choice_bytes) for row in tp_gather(shape, size)]
    return forward, tp_reduce(shape, token_bytes) + tp_reduce(shape, weight_bytes)


def _exchange_rows(rows: Value, shape: ForwardShape) -> TrafficRows:
    size = shape.operand_bytes(rows)
    return collective_traffic("all_to_all", size, shape.layout.ep, EXPERT_PARALLEL_PURPOSE, "ep")


def _all_tokens_bytes(value: Value, shape: ForwardShape) -> int:
    """Return the bytes of a value of the residual stream for the tokens of all tensor-parallel ranks."""
    return shape.tokens * value.width * shape.compute_bytes


def tp_gather(shape: ForwardShape, size: int) -> TrafficRows:
    """Return the traffic that gives each rank all tokens, which is a gather with sequence parallelism."""
    if not shape.layout.sequence_parallel:
        return []
    return collective_traffic("all_gather", size, shape.tp, TENSOR_PARALLEL_PURPOSE, "tp")


def tp_reduce(shape: ForwardShape, size: int) -> TrafficRows:
    """Return the traffic of a sum over ranks, of which each rank keeps its own tokens or all."""
    collective: Collective = "reduce_scatter" if shape.layout.sequence_parallel else "all_reduce"
    return collective_traffic(collective, size, shape.tp, TENSOR_PARALLEL_PURPOSE, "tp")


def collective_traffic(
    operation: Collective, size: int, ranks: int, purpose: str, group_kind: GroupKind
) -> TrafficRows:
    """Return a row of a collective over some ranks of bytes per rank."""
    sent = sent_bytes(operation, size, ranks)
    return [Traffic(operation=operation, bytes=sent, purpose=purpose, group_kind=group_kind)]

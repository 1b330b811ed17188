"""Model-parallel traffic of a micro-batch: activations and their gradients.

Symbols: N tokens of a micro-batch, of which sequence parallelism leaves a shard on each rank between pairs of products;
D width; tp, cp, ep the number of tensor-, context- and expert-parallel ranks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from phalanx.cost.exact.activation_memory import StageBlocks
from phalanx.cost.exact.forward_shape import ForwardShape
from phalanx.cost.exact.saved_tensors import INDEX_BYTES
from phalanx.cost.formulas.collectives import Collective, Traffic, sent_bytes
from phalanx.spec.communication_groups import GroupKind
from phalanx.spec.model import ModelSpec, MoESpec

TrafficRows = list[Traffic]
TENSOR_PARALLEL_PURPOSE = "activations and their gradients, in matrix products that ranks share"
CONTEXT_PARALLEL_PURPOSE = "keys and values, or tokens for heads, and their gradients"
EXPERT_PARALLEL_PURPOSE = "tokens to their experts and back, and their gradients"
SCALARS_PURPOSE = "numbers of each token, for losses and norms; choices of experts"


class PassTraffic(NamedTuple):
    """Traffic of the forward pass, of its recomputation, and of the backward pass."""

    forward: TrafficRows
    recompute: TrafficRows
    backward: TrafficRows


def stage_activation_traffic(spec: ModelSpec, shape: ForwardShape, stage: StageBlocks) -> TrafficRows:
    """Return the traffic of a rank in both passes through a stage, with balanced experts.

    Messages between pipeline stages are not included.

    Args:
        shape: Sizes of a micro-batch on one rank.
        stage: Blocks of a stage, or of the full model.
    """
    traffic: TrafficRows = []
    for index, layer in enumerate(stage.layers):
        attention = _attention_traffic(spec, shape)
        mlp = (
            _expert_traffic(spec, spec.moe, shape)
            if spec.moe and spec.is_moe_layer(layer)
            else _tp_pair_traffic(spec, shape)
        )
        traffic += attention.forward + attention.backward + mlp.forward + mlp.backward
        if index < stage.recomputed and shape.layout.recomputes_attention:
            traffic += attention.recompute
            traffic += mlp.recompute if shape.layout.recomputes_full_blocks else []
    x, stream_bytes = (shape.tokens * spec.hidden_size * size for size in (shape.compute_bytes, shape.residual_bytes))
    if stage.first:
        traffic += _tp_reduce(shape, stream_bytes) + _tp_gather(shape, stream_bytes)
    if stage.last:
        num_chunks = shape.num_logits_chunks(spec)
        # The backward pass gathers the head's input again, unless chunks have gradients in the forward pass.
        traffic += _tp_gather(shape, x) + (_tp_gather(shape, x) if num_chunks == 1 else []) + _tp_reduce(shape, x)
        for values in (1, 2):  # of each row: the maximum; then the sum and the target's logit
            size = values * shape.tokens * shape.high_precision_bytes
            sums = _collective_traffic("all_reduce", size, shape.tp, purpose=SCALARS_PURPOSE, group_kind="tp")
            traffic += [replace(row, calls=num_chunks) for row in sums]
    return [row for row in traffic if row.bytes]


def _tp_pair_traffic(spec: ModelSpec, shape: ForwardShape) -> PassTraffic:
    """Return the traffic of a column-parallel product followed by a row-parallel one.

    One all-reduce follows them, and in backward one precedes them (arXiv 1909.08053, section 3). With sequence
    parallelism each pass has a gather and a scatter, and backward gathers the saved input again (arXiv 2205.05198,
    section 4.2.2).
    """
    x = shape.tokens * spec.hidden_size * shape.compute_bytes
    forward = _tp_gather(shape, x) + _tp_reduce(shape, x)
    return PassTraffic(forward, forward, _tp_gather(shape, x) + _tp_gather(shape, x) + _tp_reduce(shape, x))


def _attention_traffic(spec: ModelSpec, shape: ForwardShape) -> PassTraffic:
    forward, _, backward = _tp_pair_traffic(spec, shape)
    if shape.layout.tp_attention == "gathered":
        qk_bytes = 2 * shape.tokens * spec.num_heads * spec.head_dim * shape.compute_bytes
        forward = forward + _collective_traffic(
            "all_gather", qk_bytes, shape.tp, purpose=TENSOR_PARALLEL_PURPOSE, group_kind="tp"
        )
        backward = backward + _collective_traffic(
            "reduce_scatter", qk_bytes, shape.tp, purpose=TENSOR_PARALLEL_PURPOSE, group_kind="tp"
        )
    elif spec.qk_norm == "full":
        norms = 2 * _collective_traffic(
            "all_reduce", shape.tokens * shape.high_precision_bytes, shape.tp, purpose=SCALARS_PURPOSE, group_kind="tp"
        )
        forward, backward = forward + norms, backward + norms
    cp_forward, cp_backward = (
        _ring_traffic(spec, shape) if shape.layout.cp_method == "ring" else _ulysses_traffic(spec, shape)
    )
    return PassTraffic(forward + cp_forward, forward + cp_forward, backward + cp_backward)


def _ring_traffic(spec: ModelSpec, shape: ForwardShape) -> tuple[TrafficRows, TrafficRows]:
    """Return the forward and backward traffic of ring attention (arXiv 2310.01889).

    Keys and values visit all other ranks. In backward they do so again, and their gradients take one more step to
    return to their rank.
    """
    cp = shape.layout.cp
    kv_elements = 2 * shape.tokens * shape.max_local_count(spec.num_kv_heads) * spec.head_dim
    kv_bytes = (cp - 1) * kv_elements * shape.compute_bytes
    gradient_bytes = cp * kv_elements * shape.high_precision_bytes if cp > 1 else 0
    forward = Traffic(operation="send", bytes=kv_bytes, purpose=CONTEXT_PARALLEL_PURPOSE, group_kind="cp", calls=cp - 1)
    return [forward], [
        Traffic(
            operation="send",
            bytes=kv_bytes + gradient_bytes,
            purpose=CONTEXT_PARALLEL_PURPOSE,
            group_kind="cp",
            calls=2 * cp - 1,
        )
    ]


def _ulysses_traffic(spec: ModelSpec, shape: ForwardShape) -> tuple[TrafficRows, TrafficRows]:
    """Return the forward and backward traffic of DeepSpeed-Ulysses (arXiv 2309.14509).

    Both passes exchange queries, keys, values and the output. If there are more ranks than key/value heads, ranks get
    copies of these heads.
    """
    cp = shape.layout.cp
    heads = shape.max_local_count(spec.num_heads)
    head_bytes = shape.tokens * spec.head_dim * shape.compute_bytes
    kv = max(shape.max_local_count(spec.num_kv_heads), cp)
    to_heads = _collective_traffic(
        "all_to_all", head_bytes * (heads + 2 * kv), cp, purpose=CONTEXT_PARALLEL_PURPOSE, group_kind="cp"
    )
    to_tokens = _collective_traffic(
        "all_to_all", head_bytes * heads, cp, purpose=CONTEXT_PARALLEL_PURPOSE, group_kind="cp"
    )
    return to_heads + to_tokens, to_heads + to_tokens


def _expert_traffic(spec: ModelSpec, moe: MoESpec, shape: ForwardShape) -> PassTraffic:
    """Return the traffic of an expert layer.

    With expert parallelism, each pass has two all-to-alls, and forward one more of counts (GShard, arXiv 2006.16668,
    section 3.2). If ranks share each expert's columns, tokens, choices and their weights are gathered.
    """
    layout = shape.layout
    x = shape.tokens * spec.hidden_size * shape.compute_bytes
    counts = shape.batch * moe.num_experts * shape.high_precision_bytes
    forward = _collective_traffic(
        "all_reduce", counts, shape.tp if layout.sequence_parallel else 1, purpose=SCALARS_PURPOSE, group_kind="tp"
    )
    forward = forward + _collective_traffic("all_reduce", counts, layout.cp, purpose=SCALARS_PURPOSE, group_kind="cp")
    combine: TrafficRows = []
    if layout.ep > 1:
        row_bytes = moe.top_k * shape.residual_tokens * spec.hidden_size * shape.compute_bytes
        forward = forward + _collective_traffic(
            "all_to_all", moe.num_experts * INDEX_BYTES, layout.ep, purpose=SCALARS_PURPOSE, group_kind="ep"
        )
        backward = 2 * _collective_traffic(
            "all_to_all", row_bytes, layout.ep, purpose=EXPERT_PARALLEL_PURPOSE, group_kind="ep"
        )
        forward = forward + backward
    else:
        weight_bytes = shape.tokens * moe.top_k * shape.high_precision_bytes
        choice_bytes = shape.tokens * moe.top_k * INDEX_BYTES
        forward = forward + _tp_gather(shape, x) + _tp_gather(shape, weight_bytes) + _tp_gather(shape, choice_bytes)
        combine = _tp_reduce(shape, x)
        backward = _tp_reduce(shape, x) + _tp_reduce(shape, weight_bytes) + _tp_gather(shape, x)
    if not moe.num_shared_experts:  # nothing after the sum is saved, so it is not recomputed
        return PassTraffic(forward + combine, forward, backward)
    shared = _tp_pair_traffic(spec, shape)
    forward = forward + combine + shared.forward
    return PassTraffic(forward, forward, backward + shared.backward)


def _tp_gather(shape: ForwardShape, size: int) -> TrafficRows:
    """Return the traffic that gives each rank all tokens, which is a gather with sequence parallelism."""
    return (
        _collective_traffic("all_gather", size, shape.tp, purpose=TENSOR_PARALLEL_PURPOSE, group_kind="tp")
        if shape.layout.sequence_parallel
        else []
    )


def _tp_reduce(shape: ForwardShape, size: int) -> TrafficRows:
    """Return the traffic of a sum over ranks, of which each rank keeps its own tokens or all."""
    return _collective_traffic(
        "reduce_scatter" if shape.layout.sequence_parallel else "all_reduce",
        size,
        shape.tp,
        purpose=TENSOR_PARALLEL_PURPOSE,
        group_kind="tp",
    )


def _collective_traffic(
    operation: Collective, size: int, ranks: int, purpose: str, group_kind: GroupKind
) -> TrafficRows:
    return [
        Traffic(operation=operation, bytes=sent_bytes(operation, size, ranks), purpose=purpose, group_kind=group_kind)
    ]

"""What ranks that share a model send each other for one micro-batch: activations, and gradients of them.

Symbols: N tokens of a micro-batch, of which sequence parallelism leaves a rank some between pairs of products; D width;
tp, cp, ep the ranks that share products, sequences and experts."""

from __future__ import annotations

from typing import NamedTuple

from phalanx.cost.exact.activation_memory import StageBlocks
from phalanx.cost.exact.saved_tensors import INDEX, ForwardShape
from phalanx.cost.formulas.collectives import Collective, Traffic, sent_bytes
from phalanx.spec.communication_groups import GroupKind
from phalanx.spec.model import ModelSpec, MoESpec

Sent = list[Traffic]
PRODUCTS = "activations and their gradients, of products that ranks share"
CONTEXT = "keys and values, or tokens for heads, and their gradients"
EXPERTS = "tokens to their experts and back, and their gradients"
NUMBERS = "numbers of each token, for losses and norms; choices of experts"


class PassTraffic(NamedTuple):
    """Of a model: what it sends in its forward pass, when that is computed again, and in its backward pass."""

    forward: Sent
    recompute: Sent
    backward: Sent


def stage_activation_traffic(spec: ModelSpec, run: ForwardShape, stage: StageBlocks) -> Sent:
    """What a rank sends in a forward and a backward pass through a stage (or the whole model), experts balanced; not
    what the stages of a pipeline send each other."""
    sent: Sent = []
    for layer in stage.layers:
        attention = _attention(spec, run)
        mlp = (
            _experts(spec, spec.moe, run) if spec.moe and spec.is_moe_layer(layer) else _tensor_parallel_pair(spec, run)
        )
        sent += attention.forward + attention.backward + mlp.forward + mlp.backward
        sent += attention.recompute if run.layout.activation_checkpointing != "none" else []
        sent += mlp.recompute if run.layout.activation_checkpointing == "full" else []
    x, stream = (run.tokens * spec.hidden_size * size for size in (run.compute_bytes, run.residual_bytes))
    if stage.first:
        sent += _tp_reduce(run, stream) + _tp_gather(run, stream)
    if stage.last:
        sent += _tp_gather(run, x) + _tp_gather(run, x) + _tp_reduce(run, x)
        sent += _collective("all_reduce", run.tokens * run.high_precision_bytes, run.tp, NUMBERS, "tp")
        sent += _collective("all_reduce", 2 * run.tokens * run.high_precision_bytes, run.tp, NUMBERS, "tp")
    return [row for row in sent if row.bytes]


def _tensor_parallel_pair(spec: ModelSpec, run: ForwardShape) -> PassTraffic:
    """Two products: one all-reduce behind them, and backward one before them (arXiv 1909.08053, section 3); or with
    sequence parallelism a gather and a scatter each way, and backward the kept input is gathered again
    (arXiv 2205.05198, section 4.2.2)."""
    x = run.tokens * spec.hidden_size * run.compute_bytes
    forward = _tp_gather(run, x) + _tp_reduce(run, x)
    return PassTraffic(forward, forward, _tp_gather(run, x) + _tp_gather(run, x) + _tp_reduce(run, x))


def _attention(spec: ModelSpec, run: ForwardShape) -> PassTraffic:
    forward, _, backward = _tensor_parallel_pair(spec, run)
    if run.layout.tp_attention == "gathered":
        both = 2 * run.tokens * spec.num_heads * spec.head_dim * run.compute_bytes
        forward = forward + _collective("all_gather", both, run.tp, PRODUCTS, "tp")
        backward = backward + _collective("reduce_scatter", both, run.tp, PRODUCTS, "tp")
    elif spec.qk_norm == "full":
        norms = 2 * _collective("all_reduce", run.tokens * run.high_precision_bytes, run.tp, NUMBERS, "tp")
        forward, backward = forward + norms, backward + norms
    there, back = _ring(spec, run) if run.layout.cp_method == "ring" else _ulysses(spec, run)
    return PassTraffic(forward + there, forward + there, backward + back)


def _ring(spec: ModelSpec, run: ForwardShape) -> tuple[Sent, Sent]:
    """Keys and values go on to all other ranks; backward once more, and their gradients one further, home
    (arXiv 2310.01889)."""
    cp, numbers = run.layout.cp, 2 * run.tokens * run.largest_share(spec.num_kv_heads) * spec.head_dim
    values, gradients = (
        (cp - 1) * numbers * run.compute_bytes,
        (cp * numbers * run.high_precision_bytes if cp > 1 else 0),
    )
    forward = Traffic("send", values, CONTEXT, "cp", calls=cp - 1)
    return [forward], [Traffic("send", values + gradients, CONTEXT, "cp", calls=2 * cp - 1)]


def _ulysses(spec: ModelSpec, run: ForwardShape) -> tuple[Sent, Sent]:
    """Queries, keys and values are exchanged, and what comes of them; backward the same (arXiv 2309.14509). Ranks that
    are more than key/value heads get copies of these."""
    cp, heads = run.layout.cp, run.largest_share(spec.num_heads)
    per_head, kv = run.tokens * spec.head_dim * run.compute_bytes, max(run.largest_share(spec.num_kv_heads), cp)
    there = _collective("all_to_all", per_head * (heads + 2 * kv), cp, CONTEXT, "cp")
    back = _collective("all_to_all", per_head * heads, cp, CONTEXT, "cp")
    return there + back, there + back


def _experts(spec: ModelSpec, moe: MoESpec, run: ForwardShape) -> PassTraffic:
    """A layer of experts. Over ranks with different ones two all-to-alls each way, and one of counts (GShard,
    arXiv 2006.16668, section 3.2); where ranks share each expert's columns, tokens, choices and their weights enter."""
    layout, x = run.layout, run.tokens * spec.hidden_size * run.compute_bytes
    counts = run.batch * moe.num_experts * run.high_precision_bytes
    forward = _collective("all_reduce", counts, run.tp if layout.sequence_parallel else 1, NUMBERS, "tp")
    forward = forward + _collective("all_reduce", counts, layout.cp, NUMBERS, "cp")
    last: Sent = []
    if layout.ep > 1:
        rows = moe.top_k * run.residual_tokens * spec.hidden_size * run.compute_bytes
        forward = forward + _collective("all_to_all", moe.num_experts * INDEX, layout.ep, NUMBERS, "ep")
        backward = 2 * _collective("all_to_all", rows, layout.ep, EXPERTS, "ep")
        forward = forward + backward
    else:
        weights, chosen = run.tokens * moe.top_k * run.high_precision_bytes, run.tokens * moe.top_k * INDEX
        forward = forward + _tp_gather(run, x) + _tp_gather(run, weights) + _tp_gather(run, chosen)
        last, backward = _tp_reduce(run, x), _tp_reduce(run, x) + _tp_reduce(run, weights) + _tp_gather(run, x)
    if not moe.num_shared_experts:  # nothing behind the sum is kept, so it is not computed again
        return PassTraffic(forward + last, forward, backward)
    shared = _tensor_parallel_pair(spec, run)
    forward = forward + last + shared.forward
    return PassTraffic(forward, forward, backward + shared.backward)


def _tp_gather(run: ForwardShape, size: int) -> Sent:
    """What ranks have between pairs of products, for all tokens: they are gathered, or there already."""
    return _collective("all_gather", size, run.tp, PRODUCTS, "tp") if run.layout.sequence_parallel else []


def _tp_reduce(run: ForwardShape, size: int) -> Sent:
    """A sum over ranks, of which each keeps its tokens, or all."""
    return _collective("reduce_scatter" if run.layout.sequence_parallel else "all_reduce", size, run.tp, PRODUCTS, "tp")


def _collective(operation: Collective, size: int, ranks: int, why: str, among: GroupKind) -> Sent:
    return [Traffic(operation, sent_bytes(operation, size, ranks), why, among)]

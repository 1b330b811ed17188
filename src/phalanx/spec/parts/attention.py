"""Causal self-attention with grouped key/value heads."""

from __future__ import annotations

from dataclasses import replace

from phalanx.spec.activations import GATED_OUTPUT, OUTPUT_GATES
from phalanx.spec.layout import Layout
from phalanx.spec.model import ModelSpec
from phalanx.spec.parts.operations import AttentionCore, Clip, Cut, GatherHeads, Parameter, Part, Value

LATE_NORMS = ("rotated", "rotated_plain")
"""Norms of queries and keys that follow their rotation."""


def describe_attention(spec: ModelSpec, layout: Layout, x: Value) -> Part:
    """Return attention: products with heads, norms of queries and keys, the kernel, and a product of its output."""
    part = Part("attention", "attention", x)
    heads = Cut("model.num_heads", spec.num_heads, spec.head_dim)
    groups = Cut("model.num_kv_heads", spec.num_kv_heads, spec.head_dim, copied_below=True)
    value_heads = replace(heads, unit=spec.value_width)
    value_groups = replace(groups, unit=spec.value_width)
    is_gathered = layout.tp > 1 and layout.tp_attention == "gathered"
    columns = Cut("model.num_heads x head_dim", heads.width) if is_gathered else None
    has_bias = spec.bias or spec.attention_bias != "none"
    q = part.linear("wq", x, columns or heads, bias=has_bias)
    if spec.num_shared_kv_layers:
        k, v = (Value(groups.width, groups, is_given=True) for _ in range(2))
    else:
        k = part.linear("wk", x, columns or groups, bias=has_bias)
        v = k if spec.values_from_keys else part.linear("wv", x, columns or value_groups, bias=has_bias)
    if is_gathered:
        q, k, v, heads = _gather_heads(part, q, k, heads)
        value_heads = heads
    if spec.qk_norm == "each_head":
        q = part.head_norm("q_norm", q, spec.head_dim, spec.norm_eps)
        k = k if k.is_given else part.head_norm("k_norm", k, spec.head_dim, spec.norm_eps)
    elif spec.qk_norm in ("head", "full"):
        q, k = _norm_queries_and_keys(spec, part, q, k)
    if spec.value_norm and not v.is_given:
        v = part.norm("v_norm", v, spec.value_width, spec.norm_eps, has_weight=False)
    if spec.attention_clip:
        q, k, v = (x if x.is_given else part.add(Clip(reads=(x,), writes=replace(x))) for x in (q, k, v))
    # Rotated: not the tensors that a product or norm has written.
    q = replace(q)
    k = replace(k)
    if spec.qk_norm in LATE_NORMS:
        q, k = _norm_queries_and_keys(spec, part, q, k)
    out = Value(value_heads.width, value_heads)
    keeps = (q, k, v, out)
    if spec.value_width != spec.head_dim:
        keeps = (q, k, Value(groups.width, groups), Value(heads.width, heads))
    part.add(
        AttentionCore(
            reads=(q, k, v),
            writes=out,
            keeps=keeps,
            backward_values=keeps if spec.value_width != spec.head_dim else (),
            heads=heads,
            flops_per_key=2 * (heads.width + value_heads.width),
            window=spec.sliding_window,
            chunk=spec.attention_chunk,
            parameters={"sinks": Parameter((spec.num_heads,), "zeros")} if spec.attention_sinks else {},
        )
    )
    if columns:
        out = Value(columns.width, columns, view_of=out)
    if spec.attention_gate == "channel":
        out = part.activate(GATED_OUTPUT, part.linear("wg", x, columns or value_heads, bias=has_bias), out)
    elif spec.attention_gate != "none":
        out = part.gate_heads(OUTPUT_GATES[spec.attention_gate], x, out, heads)
    if spec.indexer:
        width = spec.indexer.head_dim
        part.carried.update(
            {
                "indexer_queries": Parameter((spec.indexer.num_heads * width, spec.hidden_size)),
                "indexer_keys": Parameter((width, spec.hidden_size)),
                **{name: Parameter((width,), "zeros") for name in ("indexer_query_norm", "indexer_key_norm")},
            }
        )
    part.linear("wo", out, bias=spec.bias or spec.attention_bias == "all", init="output")
    return part


def _norm_queries_and_keys(spec: ModelSpec, part: Part, q: Value, k: Value) -> tuple[Value, Value]:
    """Append RMSNorms of queries and keys, per head or of all heads; return their outputs.

    Keys of another layer have a norm already."""
    has_weight = spec.norm_parameters != "none" and spec.qk_norm != "rotated_plain"
    form = (spec.norm_eps, bool(spec.norm_offset) and has_weight, has_weight)
    widths = (q.width, k.width) if spec.qk_norm == "full" else (spec.head_dim, spec.head_dim)
    q = part.norm("q_norm", q, widths[0], *form)
    return q, k if k.is_given else part.norm("k_norm", k, widths[1], *form)


def _gather_heads(part: Part, q: Value, k: Value, heads: Cut) -> tuple[Value, Value, Value, Cut]:
    """Return all queries and keys, and the values of a rank's heads, with these (`parallel.tensor.gathered_heads`)."""
    every = replace(heads, share="all")
    local = replace(heads, share="columns")
    part.add(GatherHeads(reads=(q, k), writes=Value(2 * heads.width, replace(every, units=2 * heads.units))))
    return Value(heads.width, every), Value(heads.width, every), Value(heads.width, local), local

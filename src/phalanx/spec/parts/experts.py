"""A mixture of experts: a router, the experts that it chooses for each token, and experts of all tokens."""

from __future__ import annotations

from dataclasses import replace

from phalanx.spec.layout import Layout
from phalanx.spec.model import ModelSpec, MoESpec
from phalanx.spec.parts.mlp import append_mlp, input_names
from phalanx.spec.parts.operations import Combine, Cut, Dispatch, Gate, Parameter, Part, Route, Value


def describe_experts(spec: ModelSpec, moe: MoESpec, layout: Layout, x: Value) -> Part:
    """Return the experts of a layer.

    Ranks have some columns of every expert and all tokens, or with expert parallelism some experts, and rows of their
    own tokens. Experts are balanced and drop no tokens, so a rank receives as many rows as it sends."""
    part = Part("mlp", "experts", x)
    E = moe.num_experts
    has_whole_experts = layout.ep > 1
    routed = x
    if moe.router_norm:
        stream = Value(x.width, tokens="residual", numbers="residual")
        routed = part.norm("router.norm", stream, x.width, spec.norm_eps)
    logits = part.linear("router.gate", routed, width=E, bias=moe.bias, is_precise=True)
    weights = part.add(
        Route(
            name="router",
            reads=(logits,),
            writes=Value(moe.top_k, tokens="residual", numbers="high"),
            num_experts=E,
            top_k=moe.top_k,
            score=moe.router_score,
            normalizes=moe.normalize_top_k,
            balances_sequences=moe.balance_loss_scope == "sequence",
            parameters={"expert_scale": Parameter((E,), "ones")} if moe.expert_scales else {},
        )
    )
    token = part.linear("latent_down", x, width=moe.latent_size) if moe.latent_size else x
    rows = Value(token.width, tokens="residual" if has_whole_experts else "all", copies=moe.top_k)
    part.add(Dispatch(reads=(token, weights), writes=rows, num_experts=E, weighs=moe.weighs_inputs))
    cut = None if has_whole_experts else Cut("model.moe.expert_ffn_size", moe.expert_ffn_size)
    names = input_names(spec.activation)
    inner = [part.grouped(leaf, rows, E, moe.expert_ffn_size, cut, bias=moe.bias) for leaf in names]
    activated = part.activate(spec.activation_with(spec.silu_limit), *inner)
    y = part.grouped("down", activated, E, token.width, None, bias=moe.bias, init="output")
    out = part.add(Combine(reads=(y, weights), writes=Value(token.width, tokens="residual")))
    if moe.latent_size:
        part.linear("latent_up", out, width=x.width, init="output")
    if moe.num_shared_experts:
        shared = Cut("model.moe.expert_ffn_size x num_shared_experts", moe.shared_width)
        y = append_mlp(part, spec, x, shared, limit=spec.shared_silu_limit, prefix="shared.")
        if moe.shared_gate:
            part.add(Gate(reads=(y, part.linear("shared_gate", x, width=1, is_precise=True)), writes=replace(y)))
    return part

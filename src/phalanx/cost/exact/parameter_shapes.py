"""Every tensor that a model trains, by name and shape, without torch: those of `phalanx.model.transformer`.

Symbols: V vocabulary, D width, F inner width, E experts; q and kv are the widths of all query and of all key/value
heads together."""

from __future__ import annotations

import math
from functools import cache

from phalanx.spec.model import ModelSpec, MoESpec

Shape = tuple[int, ...]
Shapes = dict[str, Shape]


def parameter_shapes(spec: ModelSpec) -> Shapes:
    """Shapes by the names, and in the order, of the transformer's `named_parameters`."""
    V, D = spec.vocab_size, spec.hidden_size
    blocks = {str(layer): _block(spec, layer) for layer in range(spec.num_layers)}
    return {
        **_named(embedding=_linear(V, D)),
        **(_named(positions=_linear(spec.max_seq_len, D)) if spec.position_embedding == "learned" else {}),
        **_named(blocks=_named(**blocks)),
        **_named(norm=_norm(spec)),
        **({} if spec.tie_embeddings else _named(head=_linear(V, D))),
    }


@cache
def strip_block_index(name: str) -> str:
    """A parameter's name without its block's number: "blocks.3.mlp.up.weight" is "blocks.mlp.up.weight"."""
    part, _, rest = name.partition(".")
    return f"{part}.{rest.partition('.')[2]}" if part == "blocks" else name


def num_elements(shape: Shape) -> int:
    """Numbers in a tensor of this shape."""
    return math.prod(shape)


def max_shard_elements(shape: Shape, ranks: int) -> int:
    """Numbers of the first of `ranks` that share the rows of a tensor: each has as many rows, but the last may have
    fewer, and padding in their place where all send or store equally much."""
    return -(-shape[0] // ranks) * math.prod(shape[1:])


def is_muon_parameter(name: str, shape: Shape) -> bool:
    """Whether Muon trains a tensor: matrices inside blocks, and stacks of them. AdamW trains the rest (Jordan et al.
    2024, https://kellerjordan.github.io/posts/muon/)."""
    return name.startswith("blocks.") and len(shape) >= 2


def _block(spec: ModelSpec, layer: int) -> Shapes:
    mlp = _moe(spec, spec.moe) if spec.moe and spec.is_moe_layer(layer) else _mlp(spec)
    return _named(attention_norm=_norm(spec), attention=_attention(spec), mlp_norm=_norm(spec), mlp=mlp)


def _attention(spec: ModelSpec) -> Shapes:
    D, q, kv = spec.hidden_size, spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    rows = {"wq": q, "wk": kv, "wv": kv}
    shapes = _named(**{name: _linear(count, D, spec.bias) for name, count in rows.items()}, wo=_linear(D, q, spec.bias))
    if spec.qk_norm == "none":
        return shapes
    q, kv = (spec.head_dim, spec.head_dim) if spec.qk_norm == "head" else (q, kv)
    return shapes | _named(q_norm={"weight": (q,)}, k_norm={"weight": (kv,)})


def _mlp(spec: ModelSpec) -> Shapes:
    if spec.activation == "swiglu":
        return _swiglu(spec.hidden_size, spec.ffn_hidden_size)
    return _named(
        up=_linear(spec.ffn_hidden_size, spec.hidden_size, spec.bias),
        down=_linear(spec.hidden_size, spec.ffn_hidden_size, spec.bias),
    )


def _swiglu(D: int, F: int) -> Shapes:
    return _named(gate=_linear(F, D), up=_linear(F, D), down=_linear(D, F))


def _moe(spec: ModelSpec, moe: MoESpec) -> Shapes:
    D, F, E = spec.hidden_size, moe.expert_ffn_size, moe.num_experts
    return {
        **_named(router=_named(gate=_linear(E, D))),
        **_named(experts={"gate": (E, F, D), "up": (E, F, D), "down": (E, D, F)}),
        **(_named(shared=_swiglu(D, F * moe.num_shared_experts)) if moe.num_shared_experts else {}),
    }


def _norm(spec: ModelSpec) -> Shapes:
    return {"weight": (spec.hidden_size,), **({"bias": (spec.hidden_size,)} if spec.norm == "layernorm" else {})}


def _linear(rows: int, columns: int, bias: bool = False) -> Shapes:
    return {"weight": (rows, columns), **({"bias": (rows,)} if bias else {})}


def _named(**parts: Shapes) -> Shapes:
    """The shapes of a module from those of its parts."""
    return {f"{part}.{name}": shape for part, shapes in parts.items() for name, shape in shapes.items()}

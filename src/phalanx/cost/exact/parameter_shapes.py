"""Names and shapes of all trained tensors of `phalanx.model.transformer`, without torch.

Symbols: V vocabulary, D width, F inner width, E experts; q and kv are the widths of all query and of all key/value
heads together.
"""

from __future__ import annotations

import math
from functools import cache

from phalanx.spec.model import ModelSpec, MoESpec

Shape = tuple[int, ...]
Shapes = dict[str, Shape]


def parameter_shapes(spec: ModelSpec) -> Shapes:
    """Return shapes by name, in the order of the transformer's `named_parameters`."""
    V = spec.vocab_size
    D = spec.hidden_size
    blocks = {str(layer): _block_shapes(spec, layer) for layer in range(spec.num_layers)}
    return {
        **_prefix_names(embedding=_linear_shapes(V, D)),
        **(
            _prefix_names(positions=_linear_shapes(spec.max_seq_len, D)) if spec.position_embedding == "learned" else {}
        ),
        **_prefix_names(blocks=_prefix_names(**blocks)),
        **_prefix_names(norm=_norm_shapes(spec)),
        **({} if spec.tie_embeddings else _prefix_names(head=_linear_shapes(V, D))),
    }


@cache
def strip_block_index(name: str) -> str:
    """Return a name without its block index: "blocks.3.mlp.up.weight" becomes "blocks.mlp.up.weight"."""
    part, _, rest = name.partition(".")
    return f"{part}.{rest.partition('.')[2]}" if part == "blocks" else name


def num_elements(shape: Shape) -> int:
    """Return the number of elements of a tensor of this shape."""
    return math.prod(shape)


def is_muon_parameter(name: str, shape: Shape) -> bool:
    """Return whether Muon trains a tensor: matrices inside blocks, and stacks of them.

    AdamW trains the rest (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/).
    """
    return name.startswith("blocks.") and len(shape) >= 2


def _block_shapes(spec: ModelSpec, layer: int) -> Shapes:
    mlp = _moe_shapes(spec, spec.moe) if spec.moe and spec.is_moe_layer(layer) else _mlp_shapes(spec)
    return _prefix_names(
        attention_norm=_norm_shapes(spec), attention=_attention_shapes(spec), mlp_norm=_norm_shapes(spec), mlp=mlp
    )


def _attention_shapes(spec: ModelSpec) -> Shapes:
    D = spec.hidden_size
    q = spec.num_heads * spec.head_dim
    kv = spec.num_kv_heads * spec.head_dim
    rows = {"wq": q, "wk": kv, "wv": kv}
    sinks: Shapes = {"sinks": (spec.num_heads,)} if spec.attention_sinks else {}
    shapes = sinks | _prefix_names(
        **{name: _linear_shapes(count, D, spec.bias) for name, count in rows.items()},
        wo=_linear_shapes(D, q, spec.bias),
    )
    if spec.qk_norm == "none":
        return shapes
    q, kv = (spec.head_dim, spec.head_dim) if spec.qk_norm == "head" else (q, kv)
    return shapes | _prefix_names(q_norm={"weight": (q,)}, k_norm={"weight": (kv,)})


def _mlp_shapes(spec: ModelSpec) -> Shapes:
    if spec.activation == "swiglu":
        return _swiglu_shapes(spec.hidden_size, spec.ffn_hidden_size)
    return _prefix_names(
        up=_linear_shapes(spec.ffn_hidden_size, spec.hidden_size, spec.bias),
        down=_linear_shapes(spec.hidden_size, spec.ffn_hidden_size, spec.bias),
    )


def _swiglu_shapes(D: int, F: int) -> Shapes:
    return _prefix_names(gate=_linear_shapes(F, D), up=_linear_shapes(F, D), down=_linear_shapes(D, F))


def _moe_shapes(spec: ModelSpec, moe: MoESpec) -> Shapes:
    D = spec.hidden_size
    F = moe.expert_ffn_size
    E = moe.num_experts
    return {
        **_prefix_names(router=_prefix_names(gate=_linear_shapes(E, D))),
        **_prefix_names(experts={"gate": (E, F, D), "up": (E, F, D), "down": (E, D, F)}),
        **(_prefix_names(shared=_swiglu_shapes(D, F * moe.num_shared_experts)) if moe.num_shared_experts else {}),
    }


def _norm_shapes(spec: ModelSpec) -> Shapes:
    return {"weight": (spec.hidden_size,), **({"bias": (spec.hidden_size,)} if spec.norm == "layernorm" else {})}


def _linear_shapes(rows: int, columns: int, bias: bool = False) -> Shapes:
    return {"weight": (rows, columns), **({"bias": (rows,)} if bias else {})}


def _prefix_names(**parts: Shapes) -> Shapes:
    """Return the shapes of a module, from those of its parts."""
    return {f"{part}.{name}": shape for part, shapes in parts.items() for name, shape in shapes.items()}

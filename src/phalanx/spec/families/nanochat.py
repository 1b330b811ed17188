"""nanochat: norms without weights, also of the embedding and of rotated heads, and an MLP without a gate."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from phalanx.spec.families.family import Fixed, Read, Rows
from phalanx.spec.families.llama import LLAMA
from phalanx.spec.model import ModelSpec


def swapped_halves(layer: ModelSpec, rows: int) -> Iterator[int]:
    """Yield the rows of heads with their halves swapped: a rotation by the negative angle is one of (x2, x1)."""
    for first in range(0, rows, layer.head_dim):
        middle = first + layer.head_dim // 2
        yield from range(middle, first + layer.head_dim)
        yield from range(first, middle)


NANOCHAT = replace(
    LLAMA,
    model_type="nanochat",
    architecture="NanoChatForCausalLM",
    fields=LLAMA.fields
    | {
        "vocab_size": Read("vocab_size", 50304),
        "hidden_size": Read("hidden_size", 768),
        "num_hidden_layers": Read("num_layers", 12),
        "num_attention_heads": Read("num_heads", 6),
        "intermediate_size": Read("ffn_hidden_size", 8192),
        "hidden_act": Fixed("relu2"),
        "final_logit_softcapping": Read("logits_softcap", 15.0),
    },
    constants={"qk_norm": "rotated_plain", "norm_parameters": "none", "activation": "relu2", "embedding_norm": True},
    tensors={name: stored for name, stored in LLAMA.tensors.items() if "norm" not in name and ".mlp." not in name}
    | {
        **{
            f"model.layers.{{i}}.self_attn.{name}_proj.{leaf}": Rows(f"attention.w{name}.{leaf}", order=swapped_halves)
            for name in "qk"
            for leaf in ("weight", "bias")
        },
        "model.layers.{i}.mlp.fc1.weight": "mlp.up.weight",
        "model.layers.{i}.mlp.fc2.weight": "mlp.down.weight",
    },
)

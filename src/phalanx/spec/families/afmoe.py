"""AFMoE (Arcee's Trinity): gated attention, full attention without positions, norms before and after all parts."""

from __future__ import annotations

import math
from dataclasses import replace

from phalanx.spec.families.family import Field, Fixed, Read, Table, any_value
from phalanx.spec.families.forms import FULL_NOPE, WINDOW, LayerLists, LayerTypes, LeadingDense, every_nth_full
from phalanx.spec.families.llama import (
    EXPERT_TENSORS,
    LLAMA,
    QK_NORM_TENSORS,
    SHARED_EXPERT_TENSORS,
    SIGMOID_ROUTER,
    query_heads,
)
from phalanx.spec.model import ModelSpec


class InputScale(Field):
    """Switch of the scale of the embedding, the square root of the width (muP)."""

    dials = any_value("embedding_scale")

    def read(self, name: str, config: Table, dials: Table) -> Table:
        """Return the scale, if it is on."""
        return {"embedding_scale": math.sqrt(dials["hidden_size"])} if config.get(name) else {}

    def write(self, name: str, spec: ModelSpec) -> Table:
        """Return whether there is a scale."""
        return {name: spec.embedding_scale != 1}


AFMOE = replace(
    LLAMA,
    model_type="afmoe",
    architecture="AfmoeForCausalLM",
    fields=LLAMA.fields
    | {
        "vocab_size": Read("vocab_size", 200_192),
        "hidden_size": Read("hidden_size", 2048),
        "num_attention_heads": Read("num_heads", 16),
        "num_key_value_heads": Read("num_kv_heads", None, unset=query_heads),
        "head_dim": Read("head_dim", 128),
        "intermediate_size": Read("ffn_hidden_size", 6144),
        "max_position_embeddings": Read("max_seq_len", 16384),
        "rms_norm_eps": Read("norm_eps", 1e-5),
        "attention_bias": Fixed(False),
        "sliding_window": Read("sliding_window", 1024),
        "moe_intermediate_size": Read("moe.expert_ffn_size", 1408),
        "num_experts": Read("moe.num_experts", 64),
        "num_experts_per_tok": Read("moe.top_k", 6),
        "num_shared_experts": Read("moe.num_shared_experts", 2),
        "route_scale": Read("moe.routed_scale", 1.0),
        "mup_enabled": InputScale(),
        "layer_types": LayerLists(
            {
                "layer_types": LayerTypes(
                    {"sliding_attention": WINDOW, "full_attention": FULL_NOPE},
                    every_nth_full(4, "global_attn_every_n_layers"),
                    ("global_attn_every_n_layers",),
                ),
                "num_dense_layers": LeadingDense(),
            }
        ),
        # Fields of published files, which transformers does not read.
        "score_func": Fixed("sigmoid"),
        "route_norm": Fixed(True),
        **dict.fromkeys(("n_group", "topk_group", "num_expert_groups", "num_limited_groups"), Fixed(1)),
        **dict.fromkeys(("load_balance_coeff", "use_grouped_mm"), Field()),
    },
    constants={
        "qk_norm": "head",
        "norm_position": "both",
        "attention_gate": "channel",
        **SIGMOID_ROUTER,
        "moe.normalize_top_k": True,
    },
    unused=("moe.balance_loss_coef", "moe.bias_update_rate"),
    tensors=LLAMA.tensors
    | QK_NORM_TENSORS
    | {name: stored for name, stored in EXPERT_TENSORS.items() if ".experts." in name}
    | SHARED_EXPERT_TENSORS
    | {
        "model.layers.{i}.self_attn.gate_proj.weight": "attention.wg.weight",
        "model.layers.{i}.post_attention_layernorm.weight": "attention_after.weight",
        "model.layers.{i}.pre_mlp_layernorm.weight": "mlp_norm.weight",
        "model.layers.{i}.post_mlp_layernorm.weight": "mlp_after.weight",
        "model.layers.{i}.mlp.router.gate.weight": "mlp.router.gate.weight",
        "model.layers.{i}.mlp.expert_bias": "mlp.router.bias",
    },
)

"""Mistral, and Mixtral and MiniMax-M2 with experts."""

from __future__ import annotations

from dataclasses import replace

from phalanx.spec.families.family import Field, Fixed, Read
from phalanx.spec.families.forms import FULL, WINDOW, LayerTypes, Rope
from phalanx.spec.families.llama import LLAMA, QK_NORM_TENSORS, even_head_dim, query_heads

MISTRAL = replace(
    LLAMA,
    model_type="mistral",
    architecture="MistralForCausalLM",
    wrapper="mistral3",
    fields=LLAMA.fields
    | {
        "num_key_value_heads": Read("num_kv_heads", 8, unset=query_heads),
        "intermediate_size": Read("ffn_hidden_size", 14336),
        "max_position_embeddings": Read("max_seq_len", 131072),
        "sliding_window": Read("sliding_window", 4096),
        "attention_bias": Fixed(False),
    },
)

MINISTRAL = replace(
    MISTRAL,
    model_type="ministral",
    architecture="MinistralForCausalLM",
    wrapper=None,
    fields=MISTRAL.fields
    | {
        "layer_types": LayerTypes(
            {"sliding_attention": WINDOW, "full_attention": FULL},
            lambda config, dials: (
                ["sliding_attention" if dials["sliding_window"] else "full_attention"] * dials["num_layers"]
            ),
        ),
    },
)

MIXTRAL = replace(
    MISTRAL,
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    wrapper=None,
    fields=MISTRAL.fields
    | {
        "intermediate_size": Read("moe.expert_ffn_size", 14336),
        "rms_norm_eps": Read("norm_eps", 1e-5),
        "rope_parameters": Rope(theta=1_000_000.0),
        "sliding_window": Read("sliding_window", None),
        "num_experts_per_tok": Read("moe.top_k", 2),
        "router_aux_loss_coef": Read("moe.balance_loss_coef", 0.001),
        "num_local_experts": Read("moe.num_experts", 8, other_names=("num_experts",)),
    },
    constants={
        "qk_norm": "none",
        "moe.normalize_top_k": True,
        "moe.num_leading_dense_layers": 0,
        "moe.z_loss_coef": 0.0,
    },
    unused=("ffn_hidden_size",),
    tensors=MISTRAL.tensors
    | {
        "model.layers.{i}.block_sparse_moe.gate.weight": "mlp.router.gate.weight",
        "model.layers.{i}.block_sparse_moe.experts.{e}.w1.weight": "mlp.experts.gate",
        "model.layers.{i}.block_sparse_moe.experts.{e}.w3.weight": "mlp.experts.up",
        "model.layers.{i}.block_sparse_moe.experts.{e}.w2.weight": "mlp.experts.down",
    },
)

MINIMAX_M2 = replace(
    MIXTRAL,
    model_type="minimax_m2",
    architecture="MiniMaxM2ForCausalLM",
    fields=MIXTRAL.fields
    | {
        "vocab_size": Read("vocab_size", 200064),
        "hidden_size": Read("hidden_size", 3072),
        "num_hidden_layers": Read("num_layers", 62),
        "num_attention_heads": Read("num_heads", 48),
        "head_dim": Read("head_dim", 128, unset=even_head_dim),
        "intermediate_size": Read("moe.expert_ffn_size", 1536),
        "max_position_embeddings": Read("max_seq_len", 196608),
        "rms_norm_eps": Read("norm_eps", 1e-6),
        "rope_parameters": Rope(theta=5_000_000.0, has_fraction=True),
        "partial_rotary_factor": Field(),
        "sliding_window": Fixed(None),
        "num_experts_per_tok": Read("moe.top_k", 8),
        "num_local_experts": Read("moe.num_experts", 256, other_names=("num_experts",)),
        "scoring_func": Fixed("sigmoid"),
        "use_routing_bias": Fixed(True),
        "use_qk_norm": Fixed(True),
        "qk_norm_type": Fixed("per_layer"),
        **dict.fromkeys(("attn_type_list", "use_mtp", "num_mtp_modules", "mtp_transformer_layers"), Field()),
    },
    constants=MIXTRAL.constants | {"qk_norm": "full", "moe.router_score": "sigmoid", "moe.choice_bias": True},
    unused=("ffn_hidden_size", "moe.bias_update_rate"),
    tensors=MIXTRAL.tensors
    | QK_NORM_TENSORS
    | {"model.layers.{i}.block_sparse_moe.e_score_correction_bias": "mlp.router.bias"},
)

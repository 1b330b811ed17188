"""GLM-4.5 and 4.6, and Solar Open."""

from __future__ import annotations

from dataclasses import replace

from phalanx.spec.families.family import Field, Fixed, MtpLayers, Read
from phalanx.spec.families.forms import Rope
from phalanx.spec.families.llama import (
    EXPERT_TENSORS,
    LLAMA,
    QK_NORM_TENSORS,
    SHARED_EXPERT_TENSORS,
    SIGMOID_ROUTER,
    even_head_dim,
    query_heads,
)

GLM4_MOE = replace(
    LLAMA,
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    fields=LLAMA.fields
    | {
        "vocab_size": Read("vocab_size", 151552),
        "num_hidden_layers": Read("num_layers", 46),
        "num_attention_heads": Read("num_heads", 96),
        "num_key_value_heads": Read("num_kv_heads", 8, unset=query_heads),
        "intermediate_size": Read("ffn_hidden_size", 10944),
        "max_position_embeddings": Read("max_seq_len", 131072),
        "rms_norm_eps": Read("norm_eps", 1e-5),
        "attention_bias": Read("attention_bias", False, words={False: "none", True: "qkv", None: "none"}),
        "rope_parameters": Rope(has_fraction=True, fraction=0.5),
        "partial_rotary_factor": Field(),
        "use_qk_norm": Read("qk_norm", False, words={False: "none", True: "head", None: "none"}),
        "moe_intermediate_size": Read("moe.expert_ffn_size", 1408),
        "num_experts_per_tok": Read("moe.top_k", 8),
        "n_routed_experts": Read("moe.num_experts", 128, other_names=("num_local_experts",)),
        "n_shared_experts": Read("moe.num_shared_experts", 1),
        "routed_scaling_factor": Read("moe.routed_scale", 1.0),
        "n_group": Read("moe.num_groups", 1),
        "topk_group": Read("moe.top_groups", 1),
        "first_k_dense_replace": Read("moe.num_leading_dense_layers", 1),
        "norm_topk_prob": Read("moe.normalize_top_k", True),
        "topk_method": Fixed("noaux_tc"),
        "scoring_func": Fixed("sigmoid"),
        **dict.fromkeys(("num_nextn_predict_layers", "num_mtp_layers"), Field()),
    },
    constants=SIGMOID_ROUTER,
    unused=("moe.balance_loss_coef", "moe.bias_update_rate"),
    tensors=LLAMA.tensors
    | QK_NORM_TENSORS
    | EXPERT_TENSORS
    | SHARED_EXPERT_TENSORS
    | {"model.layers.{i}.mlp.gate.e_score_correction_bias": "mlp.router.bias"},
    ignored_tensors=(*LLAMA.ignored_tensors, "model.layers.{L}.*"),
    mtp=MtpLayers(
        "num_nextn_predict_layers",
        {
            "model.layers.{i}.enorm.weight": "merge.embedding_norm.weight",
            "model.layers.{i}.hnorm.weight": "merge.stream_norm.weight",
            "model.layers.{i}.eh_proj.weight": "merge.projection.weight",
            "model.layers.{i}.shared_head.norm.weight": "stream_after.weight",
        },
    ),
)

SOLAR_OPEN = replace(
    GLM4_MOE,
    mtp=None,
    model_type="solar_open",
    architecture="SolarOpenForCausalLM",
    fields={name: field for name, field in GLM4_MOE.fields.items() if name != "partial_rotary_factor"}
    | {
        "vocab_size": Read("vocab_size", 196608),
        "num_hidden_layers": Read("num_layers", 48),
        "num_attention_heads": Read("num_heads", 64),
        "head_dim": Read("head_dim", 128, unset=even_head_dim),
        "intermediate_size": Field(),
        "moe_intermediate_size": Read("moe.expert_ffn_size", 1280),
        "rope_parameters": Rope(theta=1_000_000.0),
        "use_qk_norm": Fixed(False),
        "first_k_dense_replace": Fixed(0),
    },
    constants=GLM4_MOE.constants | {"qk_norm": "none", "moe.num_leading_dense_layers": 0},
    unused=("ffn_hidden_size", *GLM4_MOE.unused),
)

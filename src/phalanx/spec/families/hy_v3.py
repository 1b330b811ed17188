"""Hy3: the attention of Qwen3, and experts like those of DeepSeek-V3 with names of their own."""

from __future__ import annotations

from dataclasses import replace

from phalanx.spec.families.family import Field, Read, StoredTensors
from phalanx.spec.families.forms import LayersWithExperts, Rope
from phalanx.spec.families.glm4_moe import GLM4_MOE
from phalanx.spec.families.llama import (
    ATTENTION_BIAS,
    EXPERT_TENSORS,
    LLAMA,
    QK_NORM_TENSORS,
    even_head_dim,
    shared_expert_tensors,
)

ROUTER_AND_SHARED_TENSORS: StoredTensors = {
    "model.layers.{i}.mlp.router.gate.weight": "mlp.router.gate.weight",
    "model.layers.{i}.mlp.expert_bias": "mlp.router.bias",
    **shared_expert_tensors("model.layers.{i}.mlp.shared_mlp"),
}

HY_V3 = replace(
    GLM4_MOE,
    model_type="hy_v3",
    architecture="HYV3ForCausalLM",
    fields=LLAMA.fields
    | {
        "vocab_size": Read("vocab_size", 120832),
        "num_hidden_layers": Read("num_layers", 80),
        "num_attention_heads": Read("num_heads", 64),
        "num_key_value_heads": Read("num_kv_heads", 8),
        "head_dim": Read("head_dim", 128, unset=even_head_dim),
        "intermediate_size": Read("ffn_hidden_size", 13312),
        "max_position_embeddings": Read("max_seq_len", 131072),
        "rms_norm_eps": Read("norm_eps", 1e-5),
        "attention_bias": ATTENTION_BIAS,
        "rope_parameters": Rope(theta=11_158_840.0),
        "num_experts": Read("moe.num_experts", 192, other_names=("num_local_experts",)),
        "num_experts_per_tok": Read("moe.top_k", 8),
        "num_shared_experts": Read("moe.num_shared_experts", 1),
        "moe_intermediate_size": Read("moe.expert_ffn_size", 1536),
        "router_scaling_factor": Read("moe.routed_scale", 2.826),
        "mlp_layer_types": LayersWithExperts(1),
        **dict.fromkeys(("enable_moe_fp32_combine", "num_nextn_predict_layers"), Field()),
    },
    constants=GLM4_MOE.constants | {"qk_norm": "head"},
    tensors={
        name: stored
        for name, stored in (LLAMA.tensors | QK_NORM_TENSORS | EXPERT_TENSORS).items()
        if name != "model.layers.{i}.mlp.gate.weight"
    }
    | ROUTER_AND_SHARED_TENSORS,
)

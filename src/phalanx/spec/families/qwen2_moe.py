"""Qwen1.5-MoE and Qwen2-MoE: a shared expert with a gate."""

from __future__ import annotations

from dataclasses import replace

from phalanx.spec.families.family import Field, Fixed, Read, StoredTensors
from phalanx.spec.families.forms import EqualLayers, LeadingLayers
from phalanx.spec.families.llama import EXPERT_FIELDS, EXPERT_TENSORS, query_heads
from phalanx.spec.families.qwen2 import QWEN2

GATED_EXPERT_TENSORS: StoredTensors = {
    **{
        f"model.layers.{{i}}.mlp.shared_expert.{name}_proj.weight": f"mlp.shared.{name}.weight"
        for name in ("gate", "up", "down")
    },
    "model.layers.{i}.mlp.shared_expert_gate.weight": "mlp.shared_gate.weight",
}
"""The shared expert and its gate."""

QWEN2_MOE = replace(
    QWEN2,
    model_type="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    fields=QWEN2.fields
    | {
        "hidden_size": Read("hidden_size", 2048),
        "num_hidden_layers": Read("num_layers", 24),
        "num_attention_heads": Read("num_heads", 16),
        "num_key_value_heads": Read("num_kv_heads", 16, unset=query_heads),
        "intermediate_size": Read("ffn_hidden_size", 5632),
        "qkv_bias": Read("attention_bias", True, words={True: "qkv", False: "none"}),
        "use_sliding_window": Fixed(False),
        "sliding_window": Field(),
        "layer_types": EqualLayers(),
    }
    | EXPERT_FIELDS
    | {
        "num_experts": Read("moe.num_experts", 60, other_names=("num_local_experts",)),
        "num_experts_per_tok": Read("moe.top_k", 4),
        "moe_intermediate_size": Read("moe.expert_ffn_size", 1408),
        "shared_expert_intermediate_size": Read("moe.shared_ffn_size", 5632),
        "decoder_sparse_step": Fixed(1),
        "mlp_only_layers": LeadingLayers(),
    },
    constants={"moe.num_shared_experts": 1, "moe.shared_gate": True, "moe.z_loss_coef": 0.0},
    tensors=QWEN2.tensors | EXPERT_TENSORS | GATED_EXPERT_TENSORS,
)

"""GLM-4 of April 2025 (0414)."""

from __future__ import annotations

from dataclasses import replace

from phalanx.spec.families.family import Field, Read, Rows
from phalanx.spec.families.forms import Rope
from phalanx.spec.families.llama import INTERLEAVED_TENSORS, LLAMA, even_head_dim, query_heads

GLM4 = replace(
    LLAMA,
    model_type="glm4",
    architecture="Glm4ForCausalLM",
    fields=LLAMA.fields
    | {
        "vocab_size": Read("vocab_size", 151552),
        "num_hidden_layers": Read("num_layers", 40),
        "num_key_value_heads": Read("num_kv_heads", 2, unset=query_heads),
        "head_dim": Read("head_dim", 128, unset=even_head_dim),
        "intermediate_size": Read("ffn_hidden_size", 13696),
        "max_position_embeddings": Read("max_seq_len", 131072),
        "rms_norm_eps": Read("norm_eps", 1.5625e-07),
        "attention_bias": Read("attention_bias", True, words={True: "qkv", False: "none"}),
        "rope_parameters": Rope(has_fraction=True, fraction=0.5),
        "partial_rotary_factor": Field(),
    },
    constants={"norm_position": "both"},
    tensors={name: stored for name, stored in LLAMA.tensors.items() if ".mlp." not in name}
    | INTERLEAVED_TENSORS
    | {
        "model.layers.{i}.post_self_attn_layernorm.weight": "attention_after.weight",
        "model.layers.{i}.post_attention_layernorm.weight": "mlp_norm.weight",
        "model.layers.{i}.post_mlp_layernorm.weight": "mlp_after.weight",
        "model.layers.{i}.mlp.gate_up_proj.weight": Rows("mlp.gate.weight", "mlp.up.weight"),
        "model.layers.{i}.mlp.down_proj.weight": "mlp.down.weight",
    },
)

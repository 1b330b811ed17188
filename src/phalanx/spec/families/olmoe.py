"""OLMoE and FlexOlmo."""

from __future__ import annotations

from dataclasses import replace

from phalanx.spec.families.family import Read
from phalanx.spec.families.forms import Rope
from phalanx.spec.families.llama import CLIP, EXPERT_FIELDS, EXPERT_TENSORS, LLAMA, QK_NORM_TENSORS
from phalanx.spec.families.olmo import OLMO2

OLMOE = replace(
    LLAMA,
    model_type="olmoe",
    architecture="OlmoeForCausalLM",
    fields=LLAMA.fields
    | EXPERT_FIELDS
    | {
        "vocab_size": Read("vocab_size", 50304),
        "hidden_size": Read("hidden_size", 2048),
        "num_hidden_layers": Read("num_layers", 16),
        "num_attention_heads": Read("num_heads", 16),
        "intermediate_size": Read("moe.expert_ffn_size", 2048),
        "max_position_embeddings": Read("max_seq_len", 4096),
        "clip_qkv": CLIP,
        "rms_norm_eps": Read("norm_eps", 1e-5),
        "router_aux_loss_coef": Read("moe.balance_loss_coef", 0.01),
        "num_experts": Read("moe.num_experts", 64, other_names=("num_local_experts",)),
    },
    constants={"qk_norm": "full", "moe.num_leading_dense_layers": 0, "moe.z_loss_coef": 0.0},
    unused=("ffn_hidden_size",),
    tensors=LLAMA.tensors | QK_NORM_TENSORS | EXPERT_TENSORS,
)

FLEX_OLMO = replace(
    OLMO2,
    model_type="flex_olmo",
    architecture="FlexOlmoForCausalLM",
    fields=OLMO2.fields
    | EXPERT_FIELDS
    | {
        "vocab_size": Read("vocab_size", 100352),
        "intermediate_size": Read("moe.expert_ffn_size", 11008),
        "max_position_embeddings": Read("max_seq_len", 4096),
        "rms_norm_eps": Read("norm_eps", 1e-6),
        "rope_parameters": Rope(theta=500_000.0),
        "num_experts": Read("moe.num_experts", 7, other_names=("num_local_experts",)),
        "num_experts_per_tok": Read("moe.top_k", 5),
        "router_aux_loss_coef": Read("moe.balance_loss_coef", 0.01),
    },
    constants=OLMO2.constants | {"moe.num_leading_dense_layers": 0, "moe.z_loss_coef": 0.0},
    unused=("ffn_hidden_size",),
    tensors=OLMO2.tensors | EXPERT_TENSORS,
)

"""Qwen3, dense and with experts."""

from __future__ import annotations

from dataclasses import replace

from phalanx.spec.families.family import Fixed, Read, Rows
from phalanx.spec.families.forms import LeadingLayers, SwitchedWindow
from phalanx.spec.families.llama import (
    ATTENTION_BIAS,
    EXPERT_FIELDS,
    EXPERT_TENSORS,
    QK_NORM_TENSORS,
    even_head_dim,
    query_heads,
)
from phalanx.spec.families.qwen2 import QWEN2

QWEN3 = replace(
    QWEN2,
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    fields=QWEN2.fields | {"head_dim": Read("head_dim", 128, unset=even_head_dim), "attention_bias": ATTENTION_BIAS},
    constants={"qk_norm": "head"},
    tensors=QWEN2.tensors | QK_NORM_TENSORS,
)

QWEN3_MOE = replace(
    QWEN3,
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    fields=QWEN3.fields
    | {
        "hidden_size": Read("hidden_size", 2048),
        "num_hidden_layers": Read("num_layers", 24),
        "num_key_value_heads": Read("num_kv_heads", 4, unset=query_heads),
        "head_dim": Read("head_dim", None, unset=even_head_dim),
        "intermediate_size": Read("ffn_hidden_size", 6144),
        "use_sliding_window": SwitchedWindow(),
    }
    | EXPERT_FIELDS
    | {
        "moe_intermediate_size": Read("moe.expert_ffn_size", 768),
        "decoder_sparse_step": Fixed(1),
        "mlp_only_layers": LeadingLayers(),
    },
    constants={"qk_norm": "head", "moe.z_loss_coef": 0.0},
    tensors=QWEN3.tensors | EXPERT_TENSORS,
    # Those of Qwen3-VL-MoE, which its files have as [E, in, out], and transformers 5 writes as [E, out, in].
    other_tensors={
        "model.layers.{i}.mlp.experts.gate_up_proj": Rows(
            "mlp.experts.gate", "mlp.experts.up", stacked=True, transposed=None
        ),
        "model.layers.{i}.mlp.experts.down_proj": Rows("mlp.experts.down", stacked=True, transposed=None),
    },
)

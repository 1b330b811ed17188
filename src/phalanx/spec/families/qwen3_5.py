"""Qwen3.5, dense and with experts: Qwen3-Next without interleaved tensors, in files with a vision tower."""

from __future__ import annotations

from dataclasses import replace

from phalanx.spec.families.family import Field, Fixed, Read, Rows
from phalanx.spec.families.forms import ROPE_FIELDS, Rope
from phalanx.spec.families.llama import EXPERT_TENSORS, query_heads
from phalanx.spec.families.qwen2_moe import GATED_EXPERT_TENSORS
from phalanx.spec.families.qwen3_next import (
    GATED_EXPERT_CONSTANTS,
    GATED_EXPERT_FIELDS,
    HYBRID_CONSTANTS,
    HYBRID_FIELDS,
    HYBRID_TENSORS,
    QWEN3_NEXT,
)


class TextRope(Rope):
    """Rotary embedding whose positions in time, height and width are equal for text."""

    table_fields = ROPE_FIELDS | {"mrope_section", "mrope_interleaved"}


QWEN3_5 = replace(
    QWEN3_NEXT,
    model_type="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    wrapper="qwen3_5",
    wrapper_ties_embeddings=False,
    fields=HYBRID_FIELDS
    | {
        "vocab_size": Read("vocab_size", 248320),
        "num_key_value_heads": Read("num_kv_heads", 4, unset=query_heads),
        "intermediate_size": Read("ffn_hidden_size", 12288),
        "rope_parameters": TextRope(has_fraction=True, fraction=0.25),
        "mamba_ssm_dtype": Field(),
        "mlp_only_layers": Field(),
        "mtp_num_hidden_layers": Field(),
        "mtp_use_dedicated_embeddings": Field(),
    },
    constants=HYBRID_CONSTANTS,
    tensors={
        **HYBRID_TENSORS,
        "model.layers.{i}.linear_attn.in_proj_qkv.weight": Rows(
            *(f"attention.{name}.weight" for name in ("query", "key", "value"))
        ),
        "model.layers.{i}.linear_attn.in_proj_z.weight": "attention.output_gate.weight",
        "model.layers.{i}.linear_attn.in_proj_b.weight": "attention.update.weight",
        "model.layers.{i}.linear_attn.in_proj_a.weight": "attention.decay.weight",
    },
)

QWEN3_5_MOE = replace(
    QWEN3_5,
    model_type="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    wrapper="qwen3_5_moe",
    fields=QWEN3_5.fields
    | GATED_EXPERT_FIELDS
    | {
        "hidden_size": Read("hidden_size", 2048),
        "num_hidden_layers": Read("num_layers", 40),
        "num_key_value_heads": Read("num_kv_heads", 2, unset=query_heads),
        "num_experts": Read("moe.num_experts", 256, other_names=("num_local_experts",)),
        "norm_topk_prob": Fixed(True),
        "intermediate_size": Field(),
    },
    constants=HYBRID_CONSTANTS | GATED_EXPERT_CONSTANTS,
    unused=("ffn_hidden_size",),
    tensors=QWEN3_5.tensors | EXPERT_TENSORS | GATED_EXPERT_TENSORS,
    other_tensors={
        "model.layers.{i}.mlp.experts.gate_up_proj": Rows("mlp.experts.gate", "mlp.experts.up", stacked=True),
        "model.layers.{i}.mlp.experts.down_proj": Rows("mlp.experts.down", stacked=True),
    },
)

"""gpt-oss."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from phalanx.spec.families.family import Field, Read, Rows, alternating_groups
from phalanx.spec.families.forms import FULL, WINDOW, LayerTypes, Rope, every_nth_full
from phalanx.spec.families.llama import EXPERT_FIELDS, LLAMA, query_heads
from phalanx.spec.model import ModelSpec

YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}
"""Rotary embedding if config.json has none."""


def alternating(layer: ModelSpec, rows: int) -> Iterator[int]:
    """Yield the rows of two parameters in turn."""
    return alternating_groups((1, 1), rows)


GPT_OSS = replace(
    LLAMA,
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    fields=LLAMA.fields
    | {
        "vocab_size": Read("vocab_size", 201_088),
        "hidden_size": Read("hidden_size", 2880),
        "num_hidden_layers": Read("num_layers", 36),
        "num_attention_heads": Read("num_heads", 64),
        "num_key_value_heads": Read("num_kv_heads", 8, unset=query_heads),
        "head_dim": Read("head_dim", 64),
        "intermediate_size": Read("moe.expert_ffn_size", 2880),
        "max_position_embeddings": Read("max_seq_len", 131_072),
        "rms_norm_eps": Read("norm_eps", 1e-5),
        "attention_bias": Read("attention_bias", True, words={True: "all", False: "none"}),
        "rope_parameters": Rope(theta=150_000.0, absent=YARN),
        "sliding_window": Read("sliding_window", 128),
        "layer_types": LayerTypes({"sliding_attention": WINDOW, "full_attention": FULL}, every_nth_full(2)),
        "num_local_experts": Read("moe.num_experts", 128, other_names=("num_experts",)),
        "num_experts_per_tok": Read("moe.top_k", 4),
        "router_aux_loss_coef": EXPERT_FIELDS["router_aux_loss_coef"],
        "swiglu_alpha": Read("swiglu_alpha", 1.702),
        "swiglu_limit": Read("swiglu_limit", 7.0),
        # Fields of published models that transformers does not read.
        "experts_per_token": Field(),
        "initial_context_length": Field(),
    },
    constants={
        "qk_norm": "none",
        "attention_sinks": True,
        "activation": "clamped_swiglu",
        "moe.bias": True,
        # A softmax of the chosen logits alone.
        "moe.normalize_top_k": True,
        "moe.num_leading_dense_layers": 0,
        "moe.z_loss_coef": 0.0,
    },
    unused=("ffn_hidden_size",),
    tensors={name: stored for name, stored in LLAMA.tensors.items() if ".mlp." not in name}
    | {
        "model.layers.{i}.self_attn.sinks": "attention.sinks",
        "model.layers.{i}.mlp.router.weight": "mlp.router.gate.weight",
        "model.layers.{i}.mlp.router.bias": "mlp.router.gate.bias",
        "model.layers.{i}.mlp.experts.gate_up_proj": Rows(
            "mlp.experts.gate", "mlp.experts.up", stacked=True, transposed=True, order=alternating
        ),
        "model.layers.{i}.mlp.experts.gate_up_proj_bias": Rows(
            "mlp.experts.gate_bias", "mlp.experts.up_bias", stacked=True, order=alternating
        ),
        "model.layers.{i}.mlp.experts.down_proj": Rows("mlp.experts.down", stacked=True, transposed=True),
        "model.layers.{i}.mlp.experts.down_proj_bias": Rows("mlp.experts.down_bias", stacked=True),
    },
)

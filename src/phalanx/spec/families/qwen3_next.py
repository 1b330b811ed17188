"""Qwen3-Next and Qwen3.5: Gated DeltaNet in three of four layers, and attention with a gate."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from phalanx.spec.families.family import Field, Fixed, MtpLayers, Read, Rows, StoredTensors, alternating_groups
from phalanx.spec.families.forms import LayerKind, LayerTypes, OfKind, Rope, every_nth_full
from phalanx.spec.families.llama import (
    ATTENTION_BIAS,
    EXPERT_FIELDS,
    EXPERT_TENSORS,
    LLAMA,
    QK_NORM_TENSORS,
    query_heads,
)
from phalanx.spec.families.qwen2_moe import GATED_EXPERT_TENSORS
from phalanx.spec.model import ModelSpec
from phalanx.spec.parts.mixers.gated_delta import GatedDelta

DELTA = LayerKind(
    "delta",
    lambda layer: layer.mixer is not None and layer.mixer.kind == "gated_delta",
    {"mixer.kind": "gated_delta"},
)
ATTENTION = LayerKind("full", lambda layer: layer.mixer is None)


def heads_and_gates(layer: ModelSpec, rows: int) -> Iterator[int]:
    """Yield the rows of queries and of the gate, head by head."""
    return alternating_groups((layer.head_dim, layer.head_dim), rows)


def inputs_by_key_head(layer: ModelSpec, rows: int) -> Iterator[int]:
    """Yield the rows of queries, keys, values and the gate of the output, key head by key head."""
    assert isinstance(layer.mixer, GatedDelta)
    values = layer.mixer.value_heads_per_key * layer.mixer.value_head_dim
    return alternating_groups((layer.mixer.key_head_dim, layer.mixer.key_head_dim, values, values), rows)


def gates_by_key_head(layer: ModelSpec, rows: int) -> Iterator[int]:
    """Yield the rows of updates and decays, key head by key head."""
    assert isinstance(layer.mixer, GatedDelta)
    return alternating_groups((layer.mixer.value_heads_per_key,) * 2, rows)


HYBRID_FIELDS: dict[str, Field] = LLAMA.fields | {
    "num_attention_heads": Read("num_heads", 16),
    "num_key_value_heads": Read("num_kv_heads", 2, unset=query_heads),
    "head_dim": Read("head_dim", 256),
    "max_position_embeddings": Read("max_seq_len", 32768),
    "attention_bias": ATTENTION_BIAS,
    "attn_output_gate": Fixed(True),
    "rope_parameters": Rope(has_fraction=True, fraction=0.25),
    "partial_rotary_factor": Field(),
    "use_sliding_window": Field(),
    "layer_types": LayerTypes(
        {"linear_attention": DELTA, "full_attention": ATTENTION},
        every_nth_full(4, "full_attention_interval", other="linear_attention"),
        ("full_attention_interval",),
    ),
    "linear_num_key_heads": OfKind(DELTA, Read("mixer.num_key_heads", 16)),
    "linear_num_value_heads": OfKind(DELTA, Read("mixer.num_value_heads", 32)),
    "linear_key_head_dim": OfKind(DELTA, Read("mixer.key_head_dim", 128)),
    "linear_value_head_dim": OfKind(DELTA, Read("mixer.value_head_dim", 128)),
    "linear_conv_kernel_dim": OfKind(DELTA, Read("mixer.kernel_size", 4)),
}
GATED_EXPERT_FIELDS: dict[str, Field] = EXPERT_FIELDS | {
    "moe_intermediate_size": Read("moe.expert_ffn_size", 512),
    "shared_expert_intermediate_size": Read("moe.shared_ffn_size", 512),
}
HYBRID_CONSTANTS: dict[str, object] = {"qk_norm": "head", "norm_offset": True, "attention_gate": "channel"}
GATED_EXPERT_CONSTANTS: dict[str, object] = {
    "moe.num_shared_experts": 1,
    "moe.shared_gate": True,
    "moe.z_loss_coef": 0.0,
}
HYBRID_TENSORS: StoredTensors = {
    **LLAMA.tensors,
    **QK_NORM_TENSORS,
    **{
        f"model.layers.{{i}}.self_attn.q_proj.{leaf}": Rows(
            f"attention.wq.{leaf}", f"attention.wg.{leaf}", order=heads_and_gates
        )
        for leaf in ("weight", "bias")
    },
    "model.layers.{i}.linear_attn.conv1d.weight": Rows(
        *(f"attention.{name}_taps" for name in ("query", "key", "value")), unit_axes=(1,)
    ),
    "model.layers.{i}.linear_attn.A_log": "attention.A_log",
    "model.layers.{i}.linear_attn.dt_bias": "attention.dt_bias",
    "model.layers.{i}.linear_attn.norm.weight": "attention.norm.weight",
    "model.layers.{i}.linear_attn.out_proj.weight": "attention.out.weight",
}

HYBRID_MTP = MtpLayers(
    "mtp_num_hidden_layers",
    {
        "mtp.pre_fc_norm_embedding.weight": "merge.embedding_norm.weight",
        "mtp.pre_fc_norm_hidden.weight": "merge.stream_norm.weight",
        "mtp.fc.weight": "merge.projection.weight",
        "mtp.norm.weight": "stream_after.weight",
    },
    prefix="mtp.layers.0.",
    maximum=1,
)

QWEN3_NEXT = replace(
    LLAMA,
    model_type="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    fields=HYBRID_FIELDS
    | {
        "vocab_size": Read("vocab_size", 151936),
        "hidden_size": Read("hidden_size", 2048),
        "num_hidden_layers": Read("num_layers", 48),
        "intermediate_size": Read("ffn_hidden_size", 5632),
    }
    | GATED_EXPERT_FIELDS
    | {
        "num_experts": Read("moe.num_experts", 512, other_names=("num_local_experts",)),
        "num_experts_per_tok": Read("moe.top_k", 10),
        "norm_topk_prob": Read("moe.normalize_top_k", True),
        "decoder_sparse_step": Fixed(1),
        "mlp_only_layers": Fixed([]),
        "mtp_num_hidden_layers": Field(),
    },
    constants=HYBRID_CONSTANTS | GATED_EXPERT_CONSTANTS,
    tensors={
        **HYBRID_TENSORS,
        "model.layers.{i}.linear_attn.in_proj_qkvz.weight": Rows(
            *(f"attention.{name}.weight" for name in ("query", "key", "value", "output_gate")), order=inputs_by_key_head
        ),
        "model.layers.{i}.linear_attn.in_proj_ba.weight": Rows(
            "attention.update.weight", "attention.decay.weight", order=gates_by_key_head
        ),
        **EXPERT_TENSORS,
        **GATED_EXPERT_TENSORS,
    },
    ignored_tensors=(*LLAMA.ignored_tensors, "mtp.*"),
    mtp=HYBRID_MTP,
)

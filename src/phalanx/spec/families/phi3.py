"""Phi-3, and Phi-4, which has no long-context factors."""

from __future__ import annotations

from dataclasses import replace

from phalanx.spec.families.family import Field, Fixed, Read, Rows
from phalanx.spec.families.forms import Rope
from phalanx.spec.families.llama import LLAMA

PHI3 = replace(
    LLAMA,
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    fields=LLAMA.fields
    | {
        "vocab_size": Read("vocab_size", 32064),
        "hidden_size": Read("hidden_size", 3072),
        "intermediate_size": Read("ffn_hidden_size", 8192),
        "max_position_embeddings": Read("max_seq_len", 4096),
        "rms_norm_eps": Read("norm_eps", 1e-5),
        "attention_bias": Fixed(False),
        "sliding_window": Read("sliding_window", None),
        "rope_parameters": Rope(has_fraction=True),
        "partial_rotary_factor": Field(),
        # Published files name their own code, which transformers does not need.
        "auto_map": Field(),
    },
    tensors={name: stored for name, stored in LLAMA.tensors.items() if "_proj" not in name}
    | {
        "model.layers.{i}.self_attn.qkv_proj.weight": Rows(*(f"attention.w{name}.weight" for name in "qkv")),
        "model.layers.{i}.self_attn.o_proj.weight": "attention.wo.weight",
        "model.layers.{i}.mlp.gate_up_proj.weight": Rows("mlp.gate.weight", "mlp.up.weight"),
        "model.layers.{i}.mlp.down_proj.weight": "mlp.down.weight",
    },
)

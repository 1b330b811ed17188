"""Apertus: an MLP without a gate, whose activation has two trained numbers, and norms of queries and keys."""

from __future__ import annotations

from dataclasses import replace

from phalanx.spec.families.family import Fixed, Read
from phalanx.spec.families.forms import Rope
from phalanx.spec.families.llama import LLAMA, QK_NORM_TENSORS, query_heads

APERTUS = replace(
    LLAMA,
    model_type="apertus",
    architecture="ApertusForCausalLM",
    fields=LLAMA.fields
    | {
        "vocab_size": Read("vocab_size", 131_072),
        "num_key_value_heads": Read("num_kv_heads", None, unset=query_heads),
        "intermediate_size": Read("ffn_hidden_size", 14336),
        "max_position_embeddings": Read("max_seq_len", 65536),
        "rms_norm_eps": Read("norm_eps", 1e-5),
        "hidden_act": Fixed("xielu"),
        "rope_parameters": Rope(
            theta=12_000_000.0,
            absent={
                "rope_type": "llama3",
                "rope_theta": 12_000_000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 8192,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            },
        ),
        # Fields of published files, which transformers does not read.
        "qk_norm": Fixed(True),
        "post_norm": Fixed(False),
    },
    constants={"qk_norm": "head", "activation": "xielu"},
    tensors={
        name: stored for name, stored in LLAMA.tensors.items() if "layernorm" not in name and "mlp.gate" not in name
    }
    | QK_NORM_TENSORS
    | {
        "model.layers.{i}.attention_layernorm.weight": "attention_norm.weight",
        "model.layers.{i}.feedforward_layernorm.weight": "mlp_norm.weight",
        **{f"model.layers.{{i}}.mlp.act_fn.{name}": f"mlp.{name}" for name in ("alpha_p", "alpha_n")},
    },
    constant_tensors={"model.layers.{i}.mlp.act_fn.beta": 0.5, "model.layers.{i}.mlp.act_fn.eps": -1e-6},
)

"""Arcee (AFM-4.5B): an MLP without a gate."""

from __future__ import annotations

from dataclasses import replace

from phalanx.spec.families.family import Fixed, Read
from phalanx.spec.families.llama import LLAMA

ARCEE = replace(
    LLAMA,
    model_type="arcee",
    architecture="ArceeForCausalLM",
    fields=LLAMA.fields
    | {
        "hidden_size": Read("hidden_size", 2560),
        "intermediate_size": Read("ffn_hidden_size", 18432),
        "max_position_embeddings": Read("max_seq_len", 4096),
        "rms_norm_eps": Read("norm_eps", 1e-5),
        "hidden_act": Fixed("relu2"),
    },
    constants=LLAMA.constants | {"activation": "relu2"},
    tensors={name: stored for name, stored in LLAMA.tensors.items() if "gate_proj" not in name},
)

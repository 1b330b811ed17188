"""Helium: neighboring channels are rotated together."""

from __future__ import annotations

from dataclasses import replace

from phalanx.spec.families.family import Read
from phalanx.spec.families.forms import Rope
from phalanx.spec.families.llama import INTERLEAVED_TENSORS, LLAMA, query_heads

HELIUM = replace(
    LLAMA,
    model_type="helium",
    architecture="HeliumForCausalLM",
    fields=LLAMA.fields
    | {
        "vocab_size": Read("vocab_size", 48000),
        "hidden_size": Read("hidden_size", 2560),
        "num_hidden_layers": Read("num_layers", 24),
        "num_attention_heads": Read("num_heads", 20),
        "num_key_value_heads": Read("num_kv_heads", 20, unset=query_heads),
        "head_dim": Read("head_dim", 128),
        "intermediate_size": Read("ffn_hidden_size", 7040),
        "max_position_embeddings": Read("max_seq_len", 4096),
        "rms_norm_eps": Read("norm_eps", 1e-8),
        "attention_bias": Read("attention_bias", False, words={False: "none", True: "qkv", None: "none"}),
        "rope_parameters": Rope(theta=100_000.0),
    },
    tensors=LLAMA.tensors | INTERLEAVED_TENSORS,
)

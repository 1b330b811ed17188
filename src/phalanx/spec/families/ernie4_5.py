"""ERNIE 4.5 without experts."""

from __future__ import annotations

from dataclasses import replace

from phalanx.spec.families.family import Fixed, Read
from phalanx.spec.families.forms import Rope
from phalanx.spec.families.llama import INTERLEAVED_TENSORS, LLAMA, even_head_dim, query_heads

ERNIE4_5 = replace(
    LLAMA,
    model_type="ernie4_5",
    architecture="Ernie4_5ForCausalLM",
    fields=LLAMA.fields
    | {
        "vocab_size": Read("vocab_size", 103424),
        "hidden_size": Read("hidden_size", 1024),
        "num_hidden_layers": Read("num_layers", 18),
        "num_attention_heads": Read("num_heads", 16),
        "num_key_value_heads": Read("num_kv_heads", 2, unset=query_heads),
        "head_dim": Read("head_dim", 128, unset=even_head_dim),
        "intermediate_size": Read("ffn_hidden_size", 3072),
        "max_position_embeddings": Read("max_seq_len", 131072),
        "rms_norm_eps": Read("norm_eps", 1e-5),
        "tie_word_embeddings": Read("tie_embeddings", True),
        "rope_parameters": Rope(theta=500_000.0),
        "attention_bias": Fixed(False),
        "use_bias": Fixed(False),
    },
    tensors=LLAMA.tensors | INTERLEAVED_TENSORS,
)

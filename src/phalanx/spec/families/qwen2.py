"""Qwen2 and Qwen2.5."""

from __future__ import annotations

from dataclasses import replace

from phalanx.spec.families.family import Fixed, Read
from phalanx.spec.families.forms import LayerWindow
from phalanx.spec.families.llama import LLAMA, query_heads

QWEN2 = replace(
    LLAMA,
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    fields=LLAMA.fields
    | {
        "vocab_size": Read("vocab_size", 151936),
        "num_key_value_heads": Read("num_kv_heads", 32, unset=query_heads),
        "intermediate_size": Read("ffn_hidden_size", 22016),
        "max_position_embeddings": Read("max_seq_len", 32768),
        "attention_bias": Fixed(False),
        "use_sliding_window": LayerWindow(),
    },
    constants={"attention_bias": "qkv"},
)

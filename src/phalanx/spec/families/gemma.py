"""Gemma, Gemma 2, and the text model of Gemma 3."""

from __future__ import annotations

from dataclasses import replace

from phalanx.spec.families.family import Field, Fixed, Read
from phalanx.spec.families.forms import (
    FULL,
    WINDOW,
    LayerTypes,
    QueryScalar,
    RopeByType,
    ScaledWidth,
    every_nth_full,
)
from phalanx.spec.families.llama import LLAMA, QK_NORM_TENSORS, query_heads

GEMMA = replace(
    LLAMA,
    model_type="gemma",
    architecture="GemmaForCausalLM",
    fields=LLAMA.fields
    | {
        "vocab_size": Read("vocab_size", 256000),
        "hidden_size": ScaledWidth("hidden_size", 3072),
        "num_hidden_layers": Read("num_layers", 28),
        "num_attention_heads": Read("num_heads", 16),
        "num_key_value_heads": Read("num_kv_heads", 16, unset=query_heads),
        "head_dim": Read("head_dim", 256),
        "intermediate_size": Read("ffn_hidden_size", 24576),
        "max_position_embeddings": Read("max_seq_len", 8192),
        # The first published files say "gelu", and mean the approximation.
        "hidden_act": Read(
            "activation",
            "gelu_pytorch_tanh",
            words={"gelu_pytorch_tanh": "geglu_tanh", "gelu": "geglu_tanh"},
        ),
        "hidden_activation": Field(),
        "tie_word_embeddings": Read("tie_embeddings", True),
        "use_bidirectional_attention": Fixed(False),
    },
    constants={"norm_offset": True},
)

GEMMA2 = replace(
    GEMMA,
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    fields=GEMMA.fields
    | {
        "hidden_size": ScaledWidth("hidden_size", 2304),
        "num_hidden_layers": Read("num_layers", 26),
        "num_attention_heads": Read("num_heads", 8),
        "num_key_value_heads": Read("num_kv_heads", 4, unset=query_heads),
        "intermediate_size": Read("ffn_hidden_size", 9216),
        "hidden_act": Field(),
        "hidden_activation": Read("activation", "gelu_pytorch_tanh", words={"gelu_pytorch_tanh": "geglu_tanh"}),
        "query_pre_attn_scalar": QueryScalar(256),
        "sliding_window": Read("sliding_window", 4096),
        "layer_types": LayerTypes(
            {"sliding_attention": WINDOW, "full_attention": FULL},
            every_nth_full(2),
        ),
        "cache_implementation": Field(),
        "final_logit_softcapping": Read("logits_softcap", 30.0),
        "attn_logit_softcapping": Read("attention_softcap", 50.0),
    },
    constants={"norm_offset": True, "norm_position": "both"},
    tensors=LLAMA.tensors
    | {
        "model.layers.{i}.post_attention_layernorm.weight": "attention_after.weight",
        "model.layers.{i}.pre_feedforward_layernorm.weight": "mlp_norm.weight",
        "model.layers.{i}.post_feedforward_layernorm.weight": "mlp_after.weight",
    },
)

GEMMA3 = replace(
    GEMMA2,
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    wrapper="gemma3",
    fields=GEMMA2.fields
    | {
        "vocab_size": Read("vocab_size", 262208),
        "max_position_embeddings": Read("max_seq_len", 131072),
        "layer_types": LayerTypes(
            {"sliding_attention": WINDOW, "full_attention": FULL},
            every_nth_full(6, "sliding_window_pattern"),
            ("sliding_window_pattern",),
        ),
        "_sliding_window_pattern": Field(),
        "rope_parameters": RopeByType(theta=1_000_000.0, window_field="rope_local_base_freq"),
        "final_logit_softcapping": Read("logits_softcap", None),
        "attn_logit_softcapping": Fixed(None),
    },
    constants=GEMMA2.constants | {"qk_norm": "head"},
    tensors=GEMMA2.tensors | QK_NORM_TENSORS,
)

"""Fields of config.json by model family: supported fields with defaults, and fields without effect.

The values are data from the configuration classes of transformers 5.24; transformers itself is not imported.

Why: `docs/design/decisions/hf-families.md`.
"""

from __future__ import annotations

from typing import Any

from phalanx.spec.errors import UserError

Table = dict[str, Any]

_LLAMA: Table = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_parameters": None,
    "rope_scaling": None,
    "rope_theta": 10_000.0,
    "original_max_position_embeddings": None,
}
_MISTRAL = _LLAMA | {
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}
_EXPERTS: Table = {"num_experts_per_tok": 8, "num_local_experts": None}
_QWEN3 = _LLAMA | {
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
}
FAMILY_DEFAULTS: dict[str, Table] = {
    "gpt2": {
        "vocab_size": 50257,
        "n_positions": 1024,
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "n_inner": None,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
    },
    "llama": _LLAMA,
    "mistral": _MISTRAL,
    "qwen3": _QWEN3
    | {
        "intermediate_size": 22016,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_window_layers": 28,
        "layer_types": None,
    },
    "qwen3_moe": _QWEN3
    | _EXPERTS
    | {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "norm_topk_prob": False,
        "router_aux_loss_coef": 0.001,
        "mlp_only_layers": None,
    },
    "mixtral": _MISTRAL
    | _EXPERTS
    | {
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "sliding_window": None,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.001,
    },
    "olmoe": _LLAMA
    | _EXPERTS
    | {
        "vocab_size": 50304,
        "hidden_size": 2048,
        "intermediate_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "num_experts": 64,
        "norm_topk_prob": False,
        "router_aux_loss_coef": 0.01,
    },
}
"""Supported fields by model_type, with the default for a field that config.json omits. None: derived from other fields,
or off. num_local_experts is another name of num_experts."""

COUNTED_FAMILIES = {
    "qwen2": "biases of queries, keys and values",
    "phi3": "scales of long contexts",
    "gpt_oss": "biases and limits of activations",
}
"""Families that are planned but not trained, with what a plan leaves out of them: it changes neither time nor memory
noticeably. Their matrices are those of a supported family."""

UNKNOWN_PARTS = {
    "kv_lora_rank": "belongs to multi-head latent attention",
    "vision_config": "describes a vision tower",
    "query_pre_attn_scalar": "belongs to blocks with norms after attention and MLP",
}
"""Fields of families with parts that Phalanx neither trains nor counts."""

FIXED_VALUES: Table = {
    "is_causal": True,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "clip_qkv": None,
    "partial_rotary_factor": 1.0,
    "rope_interleaved": False,
    "decoder_sparse_step": 1,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
}
"""Fields that Phalanx supports with one value only, which is also the default."""

ROPE_FIELDS = frozenset(
    """
    rope_type type rope_theta factor original_max_position_embeddings low_freq_factor high_freq_factor
    beta_fast beta_slow attention_factor truncate mscale mscale_all_dim partial_rotary_factor finetuned
    """.split()  # noqa: SIM905
)
"""Fields of rope_parameters and rope_scaling that are supported or without effect."""

HARMLESS_FIELDS = frozenset(
    """
    model_type architectures _name_or_path _commit_hash transformers_version torch_dtype dtype
    bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id tokenizer_class prefix
    use_cache return_dict return_dict_in_generate output_attentions output_hidden_states output_scores
    output_router_logits torchscript use_bfloat16 tf_legacy_loss attn_implementation _attn_implementation
    _attn_implementation_autoset gradient_checkpointing pretraining_tp reorder_and_upcast_attn
    chunk_size_feed_forward pruned_heads tie_encoder_decoder is_decoder cross_attention_hidden_size
    initializer_range attention_dropout attn_pdrop embd_pdrop resid_pdrop router_jitter_noise
    id2label label2id num_labels problem_type finetuning_task task_specific_params
    summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout
    max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p
    typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids
    num_return_sequences forced_bos_token_id forced_eos_token_id remove_invalid_values
    exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
    n_ctx n_special predict_special_tokens output_past _num_labels
    max_window_layers max_sequence_length is_llama_config transformers.js_config unsloth_fixed unsloth_version
    """.split()  # noqa: SIM905
)
"""Fields that do not change the logits of these families: names, token ids, sampling, initialization, dropout, and
heads for other tasks."""


def require_known_fields(config: Table) -> None:
    """Raise UserError for an unsupported field of config.json that may change the output of the model."""
    known = FAMILY_DEFAULTS[config["model_type"]].keys() | FIXED_VALUES.keys() | HARMLESS_FIELDS
    unknown = {field: value for field, value in config.items() if field not in known}
    for table in ("rope_parameters", "rope_scaling"):
        rope = config.get(table) or {}
        unknown |= {f"{table}.{field}": value for field, value in rope.items() if field not in ROPE_FIELDS}
    for field, value in unknown.items():
        if value is None:
            continue
        problem = f"is not a known field of a {config['model_type']} model, and may change its results"
        fix = "remove it from config.json if it has no effect; otherwise use another model"
        raise UserError(f"config.json {field}", value, problem, fix=fix)


def require_supported(field: str, value: object, supported: Any) -> None:
    """Raise UserError for a value that Phalanx does not support.

    Args:
        field: Field of config.json.
        value: Value of the field.
        supported: Names of the supported values.
    """
    if value not in supported:
        raise UserError(
            f"config.json {field}", value, "is not supported", fix=f"use a model with one of: {', '.join(supported)}"
        )

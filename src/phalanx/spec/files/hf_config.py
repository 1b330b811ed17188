"""A Hugging Face config.json as a ModelSpec's table, and back. Shapes only; the weights are `model.huggingface`'s."""

from __future__ import annotations

import math
from typing import Any

from phalanx.spec.errors import UserError
from phalanx.spec.model import ModelSpec, RopeSpec

Table = dict[str, Any]
MODEL_TYPES = ("gpt2", "llama", "mistral", "qwen3", "qwen3_moe", "mixtral", "olmoe")
GELUS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
SCALINGS = {"default": "none", "linear": "linear", "llama3": "llama3", "yarn": "yarn"}
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}


def model_table(config: Table) -> Table:
    """The ModelSpec table of a Hugging Face configuration.

    Raises UserError for a model type that Phalanx does not have, or a variant of one that it cannot express.
    """
    model_type = config.get("model_type")
    _require_supported("model_type", model_type, MODEL_TYPES)
    try:
        return _parse_gpt2(config) if model_type == "gpt2" else _parse_llama_like(str(model_type), config)
    except KeyError as error:
        raise UserError("config.json", None, f"{error} is missing", "give that of a whole model") from None


def _parse_gpt2(config: Table) -> Table:
    _require_values(config, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False)
    width = config["n_embd"]
    activation = config.get("activation_function", "gelu_new")
    _require_supported("activation_function", activation, GELUS)
    return {
        "vocab_size": config["vocab_size"],
        "hidden_size": width,
        "num_layers": config["n_layer"],
        "num_heads": config["n_head"],
        "ffn_hidden_size": config.get("n_inner") or 4 * width,
        "max_seq_len": config["n_positions"],
        "norm": "layernorm",
        "norm_eps": config.get("layer_norm_epsilon", 1e-5),
        "activation": GELUS[activation],
        "position_embedding": "learned",
        "bias": True,
        "tie_embeddings": config.get("tie_word_embeddings", True),
    }


def _parse_llama_like(model_type: str, config: Table) -> Table:
    _require_values(config, hidden_act="silu", attention_bias=False, mlp_bias=False, clip_qkv=None)
    table = {
        "vocab_size": config["vocab_size"],
        "hidden_size": config["hidden_size"],
        "num_layers": config["num_hidden_layers"],
        "num_heads": config["num_attention_heads"],
        "num_kv_heads": config.get("num_key_value_heads") or config["num_attention_heads"],
        "head_dim": config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
        "ffn_hidden_size": config["intermediate_size"],
        # Within a sliding window attention is full attention: the window is the context we have.
        "max_seq_len": min(config["max_position_embeddings"], _sliding_window(model_type, config) or math.inf),
        "norm_eps": config.get("rms_norm_eps", 1e-6),
        "rope": _parse_rope(config),
        "qk_norm": {"qwen3": "head", "qwen3_moe": "head", "olmoe": "full"}.get(model_type, "none"),
        "tie_embeddings": config.get("tie_word_embeddings", False),
    }
    if model_type in ("mixtral", "olmoe", "qwen3_moe"):
        table["moe"] = _parse_moe(model_type, config)
    return table


def _sliding_window(model_type: str, config: Table) -> int | None:
    """Tokens that attention looks back over; None is all."""
    if model_type.startswith("qwen3") and not config.get("use_sliding_window"):
        return None
    return config.get("sliding_window", 4096 if model_type == "mistral" else None)


def _parse_moe(model_type: str, config: Table) -> Table:
    dense_layers = config.get("mlp_only_layers") or []
    _require_values(config, decoder_sparse_step=1, mlp_only_layers=list(range(len(dense_layers))))
    # Both names are written for every kind, by one version of transformers or another.
    experts = config["num_experts"] if "num_experts" in config else config["num_local_experts"]
    return {
        "num_experts": experts,
        "top_k": config["num_experts_per_tok"],
        "expert_ffn_size": config["moe_intermediate_size"]
        if model_type == "qwen3_moe"
        else config["intermediate_size"],
        "num_leading_dense_layers": len(dense_layers),
        "normalize_top_k": True if model_type == "mixtral" else bool(config.get("norm_topk_prob", False)),
        "balance_loss_coef": config.get("router_aux_loss_coef", 0.01),
        "z_loss_coef": 0.0,
    }


def _parse_rope(config: Table) -> Table:
    # transformers 5 writes rope_parameters; earlier ones rope_theta beside rope_scaling.
    rope_config = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope_type = rope_config.get("rope_type", rope_config.get("type", "default"))
    _require_supported("rope_type", rope_type, SCALINGS)
    _require_values(config, partial_rotary_factor=1.0)
    _require_values(rope_config, partial_rotary_factor=1.0)
    theta = rope_config.get("rope_theta") or config.get("rope_theta") or 10_000.0
    table: Table = {"theta": float(theta), "scaling": SCALINGS[rope_type]}
    if rope_type == "default":
        return table
    table["factor"] = float(rope_config["factor"])
    if rope_type in ("llama3", "yarn"):
        # Some models keep it beside the table, and transformers heeds that one first.
        top_level, nested = (source.get("original_max_position_embeddings") for source in (config, rope_config))
        table["original_context"] = top_level or nested or config["max_position_embeddings"]
    if rope_type == "yarn":
        attention_factor = 0.1 * math.log(table["factor"]) + 1.0
        _require_values(rope_config, truncate=True, attention_factor=attention_factor, mscale_all_dim=0)
    for field in ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"):
        if rope_config.get(field) is not None:
            table[field] = float(rope_config[field])
    return table


def _require_supported(field: str, value: object, supported: Any) -> None:
    if value not in supported:
        raise UserError(f"config.json {field}", value, "is not supported", f"supported: {', '.join(supported)}")


def _require_values(config: Table, **expected: object) -> None:
    """Raise UserError for a field that is there with another value than expected."""
    for field, value in expected.items():
        actual = config.get(field)
        if actual is not None and actual != value:
            raise UserError(f"config.json {field}", actual, "is not supported", f"use a model with {value}")


def hf_config(spec: ModelSpec) -> Table:
    """The Hugging Face config.json that describes `spec`.

    Raises UserError, naming the field, if no Hugging Face architecture has this shape.
    """
    if spec.position_embedding == "learned":
        return _to_gpt2(spec)
    model_type = _architecture(spec)
    rope = _to_rope(spec.rope)
    config: Table = {
        "architectures": [ARCHITECTURES[model_type]],
        "model_type": model_type,
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "intermediate_size": spec.ffn_hidden_size,
        "max_position_embeddings": spec.max_seq_len,
        "rms_norm_eps": spec.norm_eps,
        "hidden_act": "silu",
        "tie_word_embeddings": spec.tie_embeddings,
        "attention_bias": False,
        "rope_theta": spec.rope.theta,
        "rope_scaling": None if spec.rope.scaling == "none" else rope,
        "rope_parameters": rope,
        "torch_dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return config | _to_moe(model_type, spec)


def _architecture(spec: ModelSpec) -> str:
    """The Hugging Face model type with this shape."""
    _require_exportable("model", spec, norm="rmsnorm", activation="swiglu", bias=False)
    if spec.moe is None:
        model_types = {"none": "llama", "head": "qwen3"}
    else:
        model_types = {"none": "mixtral", "head": "qwen3_moe", "full": "olmoe"}
        _require_exportable("model.moe", spec.moe, num_shared_experts=0, router_score="softmax", bias_update_rate=0.0)
        if spec.qk_norm != "head":
            _require_exportable("model.moe", spec.moe, num_leading_dense_layers=0)
        if spec.qk_norm == "none":
            _require_exportable("model.moe", spec.moe, normalize_top_k=True)
    if spec.qk_norm not in model_types:
        raise UserError(
            "model.qk_norm",
            spec.qk_norm,
            "is in no Hugging Face model of ours without experts",
            "only a model with model.moe can be exported so",
        )
    return model_types[spec.qk_norm]


def _require_exportable(table: str, spec: Any, **expected: object) -> None:
    """Raise UserError for a field with another value than any Hugging Face architecture of ours has."""
    for field, value in expected.items():
        actual = getattr(spec, field)
        if actual != value:
            problem = "is in no Hugging Face architecture of ours with the rest of this shape"
            raise UserError(f"{table}.{field}", actual, problem, f"only {value!r} can be exported")


def _to_moe(model_type: str, spec: ModelSpec) -> Table:
    moe = spec.moe
    if moe is None:
        return {}
    config: Table = {"num_experts_per_tok": moe.top_k, "router_aux_loss_coef": moe.balance_loss_coef}
    if model_type == "mixtral":
        return config | {
            "num_local_experts": moe.num_experts,
            "intermediate_size": moe.expert_ffn_size,
            "sliding_window": None,
        }
    config |= {"num_experts": moe.num_experts, "norm_topk_prob": moe.normalize_top_k}
    if model_type == "olmoe":
        return config | {"intermediate_size": moe.expert_ffn_size}
    dense_layers = list(range(moe.num_leading_dense_layers))
    return config | {
        "moe_intermediate_size": moe.expert_ffn_size,
        "decoder_sparse_step": 1,
        "mlp_only_layers": dense_layers,
    }


def _to_rope(rope: RopeSpec) -> Table:
    rope_type = next(name for name, scaling in SCALINGS.items() if scaling == rope.scaling)
    table: Table = {"rope_type": rope_type, "rope_theta": rope.theta}
    if rope.scaling == "none":
        return table
    table["factor"] = rope.factor
    if rope.scaling in ("llama3", "yarn"):
        table["original_max_position_embeddings"] = rope.original_context
    if rope.scaling == "llama3":
        table |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.scaling == "yarn":
        table |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow}
    return table


def _to_gpt2(spec: ModelSpec) -> Table:
    gpt2_shape = {
        "num_kv_heads": spec.num_heads,
        "head_dim": spec.hidden_size // spec.num_heads,
        "moe": None,
        "qk_norm": "none",
    }
    _require_exportable("model", spec, norm="layernorm", bias=True, **gpt2_shape)
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": spec.vocab_size,
        "n_embd": spec.hidden_size,
        "n_layer": spec.num_layers,
        "n_head": spec.num_heads,
        "n_inner": spec.ffn_hidden_size,
        "n_positions": spec.max_seq_len,
        "n_ctx": spec.max_seq_len,
        "activation_function": next(name for name, activation in GELUS.items() if activation == spec.activation),
        "layer_norm_epsilon": spec.norm_eps,
        "tie_word_embeddings": spec.tie_embeddings,
        "torch_dtype": "float32",
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "bos_token_id": None,
        "eos_token_id": None,
    }

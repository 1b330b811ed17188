"""Conversion between a Hugging Face config.json and a ModelSpec table.

Shapes only; `model.huggingface` converts the weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from phalanx.spec.base import parse_table
from phalanx.spec.errors import UserError
from phalanx.spec.files.hf_families import (
    COUNTED_FAMILIES,
    FAMILY_DEFAULTS,
    FIXED_VALUES,
    UNKNOWN_PARTS,
    Table,
    require_supported,
)
from phalanx.spec.files.hf_window import parse_window, window_fields
from phalanx.spec.model import ModelSpec, RopeSpec

GELUS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
COUNTED_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)
SCALINGS = {"default": "none", "linear": "linear", "llama3": "llama3", "yarn": "yarn"}
NO_ARCHITECTURE = "is not used by any supported Hugging Face architecture with these model settings"
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}


def model_table(config: Table) -> Table:
    """Return the ModelSpec table of a Hugging Face configuration.

    Absent fields have the defaults of their family.

    Raises:
        UserError: The model type, or a variant of it, is not supported.
    """
    model_type = config.get("model_type")
    if model_type not in FAMILY_DEFAULTS and (part := next(filter(config.get, UNKNOWN_PARTS), None)):
        fix = f"use a model with one of: {', '.join([*FAMILY_DEFAULTS, *COUNTED_FAMILIES])}"
        problem = f"{UNKNOWN_PARTS[part]}, which Phalanx neither trains nor plans"
        raise UserError(f"config.json {part}", config[part], problem, fix)
    require_supported("model_type", model_type, FAMILY_DEFAULTS)
    _require_values(config, **FIXED_VALUES)
    config = FAMILY_DEFAULTS[str(model_type)] | config
    return _parse_gpt2(config) if model_type == "gpt2" else _parse_llama_like(str(model_type), config)


def counted_model_table(config: Table) -> Table:
    """Return the ModelSpec table with the sizes of a model of `COUNTED_FAMILIES`.

    Raises UserError if the config lacks a size, or has a variant that cannot be counted.
    """
    for field in COUNTED_SIZES:
        if config.get(field) is None:
            raise UserError(f"config.json {field}", None, "is missing", "use the config.json of a complete model")
        if not isinstance(config[field], int):
            raise UserError(f"config.json {field}", config[field], "is not a whole number", "correct the config.json")
    _require_values(config, hidden_act="silu", use_sliding_window=False)
    experts = config["model_type"] == "gpt_oss"
    base = "mixtral" if experts else "llama"
    # Scales of the rotary embedding cost nothing.
    sizes = {field: value for field, value in config.items() if field in FAMILY_DEFAULTS[base]}
    table = model_table(sizes | {"model_type": base, "rope_parameters": None, "rope_scaling": None})
    table["sliding_window"] = config.get("sliding_window") if "use_sliding_window" not in config else None
    if experts:
        default_types = ["sliding_attention", "full_attention"] * config["num_hidden_layers"]
        layer_types = (config.get("layer_types") or default_types)[: config["num_hidden_layers"]]
        full_layers = [layer for layer, layer_type in enumerate(layer_types) if layer_type == "full_attention"]
        table |= {"attention_sinks": True, "full_attention_layers": full_layers}
    return {field: value for field, value in table.items() if value is not None}


def _parse_gpt2(config: Table) -> Table:
    activation = config["activation_function"]
    require_supported("activation_function", activation, GELUS)
    return {
        "vocab_size": config["vocab_size"],
        "hidden_size": config["n_embd"],
        "num_layers": config["n_layer"],
        "num_heads": config["n_head"],
        "ffn_hidden_size": config["n_inner"] or 4 * config["n_embd"],
        "max_seq_len": config["n_positions"],
        "norm": "layernorm",
        "norm_eps": config["layer_norm_epsilon"],
        "activation": GELUS[activation],
        "position_embedding": "learned",
        "bias": True,
        "tie_embeddings": config["tie_word_embeddings"],
    }


def _parse_llama_like(model_type: str, config: Table) -> Table:
    table = {
        "vocab_size": config["vocab_size"],
        "hidden_size": config["hidden_size"],
        "num_layers": config["num_hidden_layers"],
        "num_heads": config["num_attention_heads"],
        "num_kv_heads": config["num_key_value_heads"] or config["num_attention_heads"],
        "head_dim": config["head_dim"] or config["hidden_size"] // config["num_attention_heads"],
        "ffn_hidden_size": config["intermediate_size"],
        "max_seq_len": config["max_position_embeddings"],
        "norm_eps": config["rms_norm_eps"],
        "rope": _parse_rope(config),
        "qk_norm": {"qwen3": "head", "qwen3_moe": "head", "olmoe": "full"}.get(model_type, "none"),
        "tie_embeddings": config["tie_word_embeddings"],
    }
    table |= parse_window(model_type, config)
    if "num_experts" in FAMILY_DEFAULTS[model_type]:
        table["moe"] = _parse_moe(model_type, config)
    return table


def _parse_moe(model_type: str, config: Table) -> Table:
    dense_layers = config.get("mlp_only_layers") or []
    _require_values(config, mlp_only_layers=list(range(len(dense_layers))))
    return {
        "num_experts": config["num_local_experts"] or config["num_experts"],
        "top_k": config["num_experts_per_tok"],
        "expert_ffn_size": config["moe_intermediate_size"]
        if model_type == "qwen3_moe"
        else config["intermediate_size"],
        "num_leading_dense_layers": len(dense_layers),
        "normalize_top_k": True if model_type == "mixtral" else bool(config["norm_topk_prob"]),
        "balance_loss_coef": config["router_aux_loss_coef"],
        "z_loss_coef": 0.0,
    }


def _parse_rope(config: Table) -> Table:
    # transformers 5 writes rope_parameters; earlier versions rope_theta and rope_scaling, which has precedence.
    rope_config = config["rope_scaling"] or config["rope_parameters"] or {}
    rope_type = rope_config.get("rope_type", rope_config.get("type", "default"))
    require_supported("rope_type", rope_type, SCALINGS)
    _require_values(rope_config, partial_rotary_factor=1.0)
    theta = rope_config.get("rope_theta") or config["rope_theta"]
    table: Table = {"theta": float(theta), "scaling": SCALINGS[rope_type]}
    if rope_type == "default":
        return table
    if rope_type in ("llama3", "yarn"):
        # Some models store it next to the table, and transformers reads that value first.
        top_level, nested = (source.get("original_max_position_embeddings") for source in (config, rope_config))
        table["original_context"] = top_level or nested or config["max_position_embeddings"]
    factor = rope_config.get("factor")
    if factor is None and rope_type == "yarn":
        factor = config["max_position_embeddings"] / table["original_context"]
    if factor is None:
        raise UserError(
            "config.json rope_parameters.factor", None, "is missing", fix="use the config.json of a complete model"
        )
    table["factor"] = float(factor)
    if rope_type == "yarn":
        attention_factor = 0.1 * math.log(table["factor"]) + 1.0
        _require_values(rope_config, truncate=True, attention_factor=attention_factor, mscale_all_dim=0)
    for field in ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"):
        if rope_config.get(field) is not None:
            table[field] = float(rope_config[field])
    return table


def _require_values(config: Table, **expected: object) -> None:
    """Raise UserError for a field that is present with a value other than the expected one."""
    for field, value in expected.items():
        actual = config.get(field)
        if actual is not None and actual != value:
            raise UserError(
                f"config.json {field}", actual, "is not supported", fix=f"use a model with {field} = {value}"
            )


def hf_config(spec: ModelSpec) -> Table:
    """Return the Hugging Face config.json that describes `spec`.

    Raises:
        UserError: No Hugging Face architecture has this shape. The message names the field.
    """
    if spec.implementation is not None:
        problem = "has no Hugging Face architecture"
        fix = "load the network with phalanx.load_model, and save its weights"
        raise UserError("model.implementation", spec.implementation.class_path, problem, fix=fix)
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
    return config | window_fields(model_type, spec) | _to_moe(model_type, spec)


def merge_hf_config(spec: ModelSpec, source: Table) -> Table:
    """Return the original config.json `source`, changed where `spec` differs from it.

    A model of another type, such as a dense model that was given experts, keeps only the special tokens.
    """
    before = hf_config(parse_table(ModelSpec, model_table(source)))
    after = hf_config(spec)
    if before["model_type"] != after["model_type"]:
        return after | {field: value for field, value in source.items() if field in SPECIAL_TOKENS}
    changed = {field: value for field, value in after.items() if value != before.get(field)}
    if "rope_parameters" in changed:  # transformers would give it precedence
        source = {field: value for field, value in source.items() if field != "original_max_position_embeddings"}
    return source | changed


def _architecture(spec: ModelSpec) -> str:
    """Return the Hugging Face model type with this shape."""
    llama_shape = {"position_embedding": "rope", "activation": "swiglu", "bias": False, "attention_sinks": False}
    _require_exportable("model", spec, norm="rmsnorm", **llama_shape)
    if spec.moe is None:
        model_types = {"none": "llama" if spec.sliding_window is None else "mistral", "head": "qwen3"}
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
            "is not used by any supported Hugging Face architecture without experts",
            fix="export a model with model.moe, or one with another model.qk_norm",
        )
    if model_types[spec.qk_norm] == "olmoe":
        _require_exportable("model", spec, sliding_window=None)
    if model_types[spec.qk_norm] != "qwen3":
        _require_exportable("model", spec, full_attention_layers=())
    return model_types[spec.qk_norm]


def _require_exportable(table: str, spec: Any, **expected: object) -> None:
    """Raise UserError for a field whose value no supported Hugging Face architecture has."""
    for field, value in expected.items():
        actual = getattr(spec, field)
        if actual != value:
            fix = f"export a model with {table}.{field} = {value!r}"
            raise UserError(f"{table}.{field}", actual, NO_ARCHITECTURE, fix=fix)


def _to_moe(model_type: str, spec: ModelSpec) -> Table:
    moe = spec.moe
    if moe is None:
        return {}
    config: Table = {"num_experts_per_tok": moe.top_k, "router_aux_loss_coef": moe.balance_loss_coef}
    if model_type == "mixtral":
        return config | {
            "num_local_experts": moe.num_experts,
            "intermediate_size": moe.expert_ffn_size,
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


def _hf_name(field: str, value: str, names: Mapping[str, str]) -> str:
    """Return the first Hugging Face name of a value, or raise UserError. `names` maps these names to our values."""
    for name, known in names.items():
        if known == value:
            return name
    values = " or ".join(map(repr, dict.fromkeys(names.values())))
    raise UserError(field, value, NO_ARCHITECTURE, fix=f"export a model with {field} = {values}")


def _to_rope(rope: RopeSpec) -> Table:
    rope_type = _hf_name("model.rope.scaling", rope.scaling, SCALINGS)
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
        "sliding_window": None,
        "attention_sinks": False,
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
        "activation_function": _hf_name("model.activation", spec.activation, GELUS),
        "layer_norm_epsilon": spec.norm_eps,
        "tie_word_embeddings": spec.tie_embeddings,
        "torch_dtype": "float32",
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "bos_token_id": None,
        "eos_token_id": None,
    }

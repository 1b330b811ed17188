"""A Hugging Face config.json as a ModelSpec's table, and back. Shapes only; the weights are `model.hf`'s."""

from __future__ import annotations

from typing import Any

from phalanx.spec.errors import UserError
from phalanx.spec.model import ModelSpec

Table = dict[str, Any]
KNOWN = ("gpt2", "llama", "mistral", "qwen3", "qwen3_moe", "mixtral", "olmoe")


def model_table(config: Table) -> Table:
    """The ModelSpec table of a Hugging Face configuration.

    Raises UserError for a model type that Phalanx does not have, or a variant of one that it cannot express.
    """
    kind = config.get("model_type")
    if kind not in KNOWN:
        raise UserError("config.json model_type", kind, "is not supported", f"supported: {', '.join(KNOWN)}")
    try:
        return _gpt2(config) if kind == "gpt2" else _llama_like(str(kind), config)
    except KeyError as error:
        raise UserError("config.json", None, f"{error} is missing", "give the config.json of a whole model") from None


def _gpt2(config: Table) -> Table:
    width = config["n_embd"]
    activation = config.get("activation_function", "gelu_new")
    _known("activation_function", activation, {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"})
    return {
        "vocab": config["vocab_size"],
        "width": width,
        "layers": config["n_layer"],
        "heads": config["n_head"],
        "ffn": config.get("n_inner") or 4 * width,
        "context": config["n_positions"],
        "norm": "layernorm",
        "norm_eps": config.get("layer_norm_epsilon", 1e-5),
        "activation": "gelu" if activation == "gelu" else "gelu_tanh",
        "positions": "learned",
        "bias": True,
        "tied": config.get("tie_word_embeddings", True),
    }


def _llama_like(kind: str, config: Table) -> Table:
    _known("hidden_act", config.get("hidden_act", "silu"), {"silu": "swiglu"})
    for field in ("attention_bias", "mlp_bias", "clip_qkv"):
        if config.get(field):
            raise UserError(f"config.json {field}", config[field], "is not supported", "use a model without it")
    table = {
        "vocab": config["vocab_size"],
        "width": config["hidden_size"],
        "layers": config["num_hidden_layers"],
        "heads": config["num_attention_heads"],
        "kv_heads": config.get("num_key_value_heads") or config["num_attention_heads"],
        "head_dim": config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
        "ffn": config["intermediate_size"],
        "context": config["max_position_embeddings"],
        "norm_eps": config.get("rms_norm_eps", 1e-6),
        "rope": _rope(config),
        "qk_norm": {"qwen3": "head", "qwen3_moe": "head", "olmoe": "full"}.get(kind, "none"),
        "tied": config.get("tie_word_embeddings", False),
    }
    if kind in ("mixtral", "olmoe", "qwen3_moe"):
        table["moe"] = _moe(kind, config)
    return table


def _moe(kind: str, config: Table) -> Table:
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        raise UserError("config.json decoder_sparse_step", config.get("decoder_sparse_step"), "mixes dense layers in",
                        "use a model whose layers all have experts")  # fmt: skip
    experts = config["num_local_experts"] if kind == "mixtral" else config["num_experts"]
    return {
        "experts": experts,
        "top_k": config["num_experts_per_tok"],
        "ffn": config["moe_intermediate_size"] if kind == "qwen3_moe" else config["intermediate_size"],
        "normalize_top_k": True if kind == "mixtral" else bool(config.get("norm_topk_prob", False)),
        "balance_loss": config.get("router_aux_loss_coef", 0.01),
        "z_loss": 0.0,
    }


def _rope(config: Table) -> Table:
    # transformers 5 writes rope_parameters; earlier ones rope_theta beside rope_scaling.
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    names = {"default": "none", "linear": "linear", "llama3": "llama3", "yarn": "yarn"}
    _known("rope_type", kind, names)
    table = {"theta": float(parameters.get("rope_theta", config.get("rope_theta", 10_000.0))), "scaling": names[kind]}
    if kind != "default":
        original = parameters.get("original_max_position_embeddings", config["max_position_embeddings"])
        table |= {"factor": float(parameters["factor"]), "original_context": original}
        for field in ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"):
            if parameters.get(field) is not None:
                table[field] = float(parameters[field])
    return table


def _known(field: str, value: object, names: Table) -> None:
    if value not in names:
        raise UserError(f"config.json {field}", value, "is not supported", f"supported: {', '.join(names)}")


def hf_config(spec: ModelSpec) -> Table:
    """The Hugging Face config.json that describes `spec`.

    Raises UserError if no Hugging Face architecture has this shape.
    """
    if spec.positions == "learned":
        return _to_gpt2(spec)
    kind = _architecture(spec)
    names = {
        "llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM", "mixtral": "MixtralForCausalLM",
        "olmoe": "OlmoeForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM",
    }  # fmt: skip
    rope = _to_rope(spec)
    config = {
        "architectures": [names[kind]], "model_type": kind, "vocab_size": spec.vocab, "hidden_size": spec.width,
        "num_hidden_layers": spec.layers, "num_attention_heads": spec.heads, "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim, "intermediate_size": spec.ffn, "max_position_embeddings": spec.context,
        "rms_norm_eps": spec.norm_eps, "hidden_act": "silu", "tie_word_embeddings": spec.tied,
        "attention_bias": False, "rope_theta": spec.rope.theta, "rope_scaling": None if spec.rope.scaling == "none" else rope,
        "rope_parameters": rope, "torch_dtype": "float32", "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    if spec.moe is not None:
        moe = spec.moe
        config |= {"num_experts_per_tok": moe.top_k, "router_aux_loss_coef": moe.balance_loss}
        if kind == "mixtral":
            config |= {"num_local_experts": moe.experts, "intermediate_size": moe.ffn, "sliding_window": None}
        else:
            config |= {"num_experts": moe.experts, "norm_topk_prob": moe.normalize_top_k, "decoder_sparse_step": 1}
            config |= {"moe_intermediate_size": moe.ffn} if kind == "qwen3_moe" else {"intermediate_size": moe.ffn}
    return config


def _architecture(spec: ModelSpec) -> str:
    """The Hugging Face model type with this shape."""
    plain = spec.norm == "rmsnorm" and spec.activation == "swiglu" and not spec.bias
    moe = spec.moe
    if plain and moe is None and spec.qk_norm in ("none", "head"):
        return "qwen3" if spec.qk_norm == "head" else "llama"
    standard = moe and not moe.shared_experts and not moe.first_dense and moe.score == "softmax" and not moe.bias_update_rate
    if plain and moe and standard:
        if spec.qk_norm == "none" and moe.normalize_top_k:
            return "mixtral"
        if spec.qk_norm == "head":
            return "qwen3_moe"
        if spec.qk_norm == "full" and spec.head_dim * spec.heads == spec.width:
            return "olmoe"
    raise UserError(
        "model", spec.preset, "has a shape that no Hugging Face architecture of ours has",
        f"one of {', '.join(KNOWN)} can be exported",
    )  # fmt: skip


def _to_rope(spec: ModelSpec) -> Table:
    rope = spec.rope
    table: Table = {"rope_type": "default" if rope.scaling == "none" else rope.scaling, "rope_theta": rope.theta}
    if rope.scaling == "none":
        return table
    table |= {"factor": rope.factor}
    if rope.scaling in ("llama3", "yarn"):
        table["original_max_position_embeddings"] = rope.original_context
    if rope.scaling == "llama3":
        table |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.scaling == "yarn":
        table |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow}
    return table


def _to_gpt2(spec: ModelSpec) -> Table:
    fits = spec.norm == "layernorm" and spec.bias and spec.activation != "swiglu" and spec.kv_heads == spec.heads
    if not fits or spec.head_dim * spec.heads != spec.width or spec.moe is not None:
        raise UserError("model.positions", spec.positions, "only GPT-2's shape is exported with learned positions",
                        'use layernorm, bias and gelu, or positions = "rope"')  # fmt: skip
    return {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": spec.vocab, "n_embd": spec.width,
        "n_layer": spec.layers, "n_head": spec.heads, "n_inner": spec.ffn, "n_positions": spec.context,
        "n_ctx": spec.context, "activation_function": "gelu_new" if spec.activation == "gelu_tanh" else "gelu",
        "layer_norm_epsilon": spec.norm_eps, "tie_word_embeddings": spec.tied, "torch_dtype": "float32",
        "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip

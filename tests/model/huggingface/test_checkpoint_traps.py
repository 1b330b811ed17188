"""Checkpoints that could load and compute something else: logits in fp64 are compared with transformers."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from phalanx.model.generation import generate
from phalanx.model.huggingface.checkpoint import open_hf_weights
from phalanx.model.huggingface.export import export_hf
from phalanx.spec.errors import UserError
from phalanx.spec.families.registry import families
from phalanx.spec.families.wrappers import PLAIN_TEXT_TYPES, text_config, wrapped_config
from phalanx.spec.files.load import load_model_spec
from tests.helpers.altered_fields import altered_fields
from tests.helpers.random_models import load_model

WINDOW = 16
SHAPE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
EXPERTS = {"num_experts_per_tok": 2, "num_experts": 4}
LATENT = {
    **SHAPE,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}
SIGMOID_EXPERTS = {
    "num_experts_per_tok": 2,
    "n_routed_experts": 8,
    "moe_intermediate_size": 24,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
}
INDEXER = {"index_topk": 64, "index_n_heads": 3, "index_head_dim": 8}
NO_PREDICTION = {"num_nextn_predict_layers": 0}
DELTA = {
    **SHAPE,
    "num_hidden_layers": 3,
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "full_attention_interval": 2,
    # Outputs of a document's first tokens may be near 0. With 1e-6, their norm amplifies roundings in each layer.
    "rms_norm_eps": 1e-2,
    "partial_rotary_factor": 0.5,
}
GATED_EXPERTS = {**EXPERTS, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
KINDS = {
    "deepseek_v3": {**LATENT, **SIGMOID_EXPERTS, **NO_PREDICTION, "num_hidden_layers": 3, "first_k_dense_replace": 1},
    "deepseek_v32": {**LATENT, **SIGMOID_EXPERTS, **INDEXER, "num_hidden_layers": 3, "first_k_dense_replace": 1},
    "glm_moe_dsa": {
        **LATENT,
        **SIGMOID_EXPERTS,
        **INDEXER,
        "num_hidden_layers": 3,
        "v_head_dim": 12,
        "first_k_dense_replace": 1,
    },
    "glm4_moe_lite": {**LATENT, **SIGMOID_EXPERTS, "num_hidden_layers": 3, "v_head_dim": 12},
    "youtu": LATENT,
    "mistral4": {
        **LATENT,
        **SIGMOID_EXPERTS,
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
        "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.4, "llama_4_scaling_beta": 0.3},
    },
    "deepseek_v2": {
        **LATENT,
        **SIGMOID_EXPERTS,
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
        "topk_method": "group_limited_greedy",
    },
    "kimi_linear": {
        **{field: value for field, value in LATENT.items() if field not in ("max_position_embeddings", "q_lora_rank")},
        "model_max_length": 64,
        "pad_token_id": 0,
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "linear_attention", "full_attention"],
        "rms_norm_eps": 1e-2,
        "linear_num_heads": 4,
        "linear_head_dim": 8,
        "num_experts": 8,
        "num_experts_per_token": 2,
        "moe_intermediate_size": 24,
        "num_expert_group": 4,
        "topk_group": 2,
    },
    "bailing_hybrid": {
        **LATENT,
        "q_lora_rank": None,
        "head_dim": 8,
        "num_hidden_layers": 3,
        "layer_group_size": 2,
        "first_k_dense_replace": 1,
        "rms_norm_eps": 1e-2,
        "moe_intermediate_size": 24,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 4,
        "topk_group": 2,
        "num_mtp_layers": 0,
        "pad_token_id": 0,
        "eos_token_id": 1,
    },
    "dots1": {**SHAPE, **SIGMOID_EXPERTS, "n_shared_experts": 1, "num_hidden_layers": 3, "first_k_dense_replace": 1},
    "hy_v3": {
        **SHAPE,
        **EXPERTS,
        "head_dim": 8,
        "num_hidden_layers": 3,
        "moe_intermediate_size": 24,
        "router_scaling_factor": 2.5,
    },
    "solar_open": {
        **{name: size for name, size in SHAPE.items() if name != "intermediate_size"},
        **SIGMOID_EXPERTS,
        "head_dim": 8,
    },
    "flex_olmo": {**SHAPE, **EXPERTS, "pad_token_id": 0},
    "ernie4_5_moe": {
        **SHAPE,
        "num_hidden_layers": 3,
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 24,
    },
    "exaone_moe": {
        **SHAPE,
        **{name: value for name, value in SIGMOID_EXPERTS.items() if name != "n_routed_experts"},
        "num_experts": 8,
        "num_hidden_layers": 5,
        "sliding_window": WINDOW,
    },
    "lfm2_moe": {
        **SHAPE,
        **EXPERTS,
        "num_hidden_layers": 4,
        "num_dense_layers": 1,
        "moe_intermediate_size": 24,
        "conv_L_cache": 4,
        "layer_types": ["conv", "full_attention", "conv", "conv"],
    },
    "olmo_hybrid": {
        **SHAPE,
        "num_hidden_layers": 4,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 4,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
        "rms_norm_eps": 1e-2,
    },
    "llama": SHAPE,
    "arcee": SHAPE,
    "helium": {**SHAPE, "head_dim": 8},
    "nanochat": {**SHAPE, "final_logit_softcapping": 2.0, "rms_norm_eps": 1e-3},
    "hunyuan_v1_dense": {**SHAPE, "head_dim": 8},
    "muse_glimmer_text": {
        **SHAPE,
        "num_hidden_layers": 5,
        "head_dim": 8,
        "sliding_window": WINDOW,
        "qk_scale_factor": 1.9,
        "output_multiplier": 0.4,
        "final_logit_softcapping": 3.0,
        "rms_norm_eps": 1e-3,
        "post_norm_eps": 1e-2,
    },
    "step3p5": {
        **SHAPE,
        "num_hidden_layers": 5,
        "head_dim": 8,
        "pad_token_id": 0,
        "layer_types": ["full_attention", *["sliding_attention"] * 3, "full_attention"],
        "moe_layers_enum": "1,2,4",
        "num_sliding_attention_heads": 12,
        "sliding_window": WINDOW,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "share_expert_dim": 40,
        "swiglu_limits": [0.0, None, 0.3, 0.3, 0.3],
        "swiglu_limits_shared": [0.0, 0.0, 0.5, 0.5, 0.0],
        "rope_theta": [5e6, *[1e4] * 3, 5e6],
        "partial_rotary_factors": [0.5, *[1.0] * 3, 0.5],
    },
    "mimo_v2_flash": {
        **SHAPE,
        **{name: value for name, value in SIGMOID_EXPERTS.items() if name != "routed_scaling_factor"},
        "num_hidden_layers": 4,
        "num_key_value_heads": 1,
        "head_dim": 12,
        "v_head_dim": 8,
        "sliding_window": WINDOW,
    },
    "laguna": {
        **SHAPE,
        **EXPERTS,
        "num_hidden_layers": 4,
        "head_dim": 8,
        "layer_types": ["full_attention", *["sliding_attention"] * 3],
        "num_attention_heads_per_layer": [4, 8, 8, 12],
        "sliding_window": WINDOW,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
        "moe_routed_scaling_factor": 2.5,
    },
    "apertus": SHAPE,
    "afmoe": {
        **SHAPE,
        "num_hidden_layers": 4,
        "head_dim": 8,
        "sliding_window": WINDOW,
        "moe_intermediate_size": 24,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "route_scale": 1.7,
        "mup_enabled": True,
    },
    "llama4_text": {
        **SHAPE,
        "num_hidden_layers": 4,
        "head_dim": 8,
        "intermediate_size_mlp": 40,
        "interleave_moe_layer_step": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "attention_chunk_size": WINDOW,
        "attn_scale": 0.4,
        "floor_scale": 8,
    },
    "mistral": {**SHAPE, "sliding_window": None},
    "ministral3": {
        **SHAPE,
        "head_dim": 8,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.4,
        },
    },
    "qwen3": {**SHAPE, "head_dim": 8},
    "qwen3_moe": {**SHAPE, **EXPERTS, "head_dim": 8, "moe_intermediate_size": 24},
    "mixtral": {**SHAPE, "num_experts_per_tok": 2, "num_local_experts": 4},
    "olmoe": {**SHAPE, **EXPERTS, "clip_qkv": 0.5},
    "lfm2": {**SHAPE, "num_hidden_layers": 3, "block_multiple_of": 8, "conv_L_cache": 4, "full_attn_idxs": [1]},
    "lfm3": {
        **SHAPE,
        "num_hidden_layers": 4,
        "head_dim": 8,
        "sliding_window": 12,
        "layer_types": ["conv", "sliding_attention", "full_attention", "conv"],
        "conv_L_cache": 5,
        "pad_token_id": 0,
        "bos_token_id": 0,
        "eos_token_id": 1,
    },
    "qwen2": SHAPE,
    "qwen2_moe": {**SHAPE, **EXPERTS, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40},
    "qwen3_next": {**DELTA, **GATED_EXPERTS},
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": {**DELTA, **GATED_EXPERTS},
    "glm4_moe": {**SHAPE, **SIGMOID_EXPERTS, **NO_PREDICTION, "num_hidden_layers": 3, "use_qk_norm": True},
    "minimax_m2": {**SHAPE, "head_dim": 8, "num_experts_per_tok": 2, "num_local_experts": 4},
    "minimax_m3_vl_text": {
        **SHAPE,
        "num_hidden_layers": 3,
        "head_dim": 24,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        "rotary_dim": 12,
        "intermediate_size": 24,
        "dense_intermediate_size": 48,
        "shared_intermediate_size": 40,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "swiglu_limit": 0.8,
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_block_size": 16,
        "index_topk_blocks": 4,
        "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
        "mlp_layer_types": ["dense", "sparse", "dense"],
        "pad_token_id": 0,
        "bos_token_id": 0,
        "eos_token_id": 1,
    },
    "gpt_oss": {
        **SHAPE,
        "head_dim": 8,
        "num_experts_per_tok": 2,
        "num_local_experts": 4,
        "sliding_window": WINDOW,
        "swiglu_limit": 0.8,
    },
    "granite": {**SHAPE, "attention_multiplier": 0.3, "embedding_multiplier": 3.0, "residual_multiplier": 0.4},
    "granitemoe": {**SHAPE, "num_local_experts": 4, "attention_multiplier": 0.3},
    "granitemoehybrid": {
        **SHAPE,
        "num_hidden_layers": 3,
        "num_local_experts": 4,
        "shared_intermediate_size": 40,
        "attention_multiplier": 0.3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "mamba_n_heads": 8,
        "mamba_d_state": 8,
        "mamba_chunk_size": 16,
    },
    "nemotron_h": {
        **{field: value for field, value in SHAPE.items() if field != "num_hidden_layers"},
        "hybrid_override_pattern": "ME*-M",
        "head_dim": 8,
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "ssm_state_size": 8,
        "chunk_size": 16,
        "n_routed_experts": 8,
        "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 40,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "time_step_min": 0.3,
    },
    "falcon_h1": {
        **SHAPE,
        "mamba_d_ssm": 48,
        "mamba_n_heads": 6,
        "mamba_d_state": 8,
        "mamba_chunk_size": 16,
        "mamba_norm_before_gate": False,
        "embedding_multiplier": 3.0,
        "lm_head_multiplier": 0.6,
        "mlp_multipliers": [0.7, 1.3],
        "attention_in_multiplier": 0.8,
        "key_multiplier": 0.6,
        "attention_out_multiplier": 1.2,
        "ssm_in_multiplier": 1.1,
        "ssm_multipliers": [0.7, 0.9, 1.2, 1.3, 0.8],
        "ssm_out_multiplier": 0.5,
    },
    "phi3": {**SHAPE, "pad_token_id": 0, "original_max_position_embeddings": 64},
    "smollm3": {**SHAPE, "num_hidden_layers": 4, "pad_token_id": 0, "use_sliding_window": False},
    "olmo2": {**SHAPE, "pad_token_id": 0},
    "olmo3": {**SHAPE, "num_hidden_layers": 4, "pad_token_id": 0, "sliding_window": WINDOW},
    "gemma": {**SHAPE, "head_dim": 8},
    "gemma2": {**SHAPE, "head_dim": 8, "query_pre_attn_scalar": 12, "sliding_window": WINDOW},
    "gemma3_text": {
        **SHAPE,
        "head_dim": 8,
        "num_hidden_layers": 6,
        "query_pre_attn_scalar": 12,
        "sliding_window": WINDOW,
    },
    "gemma4_text": {
        **SHAPE,
        "head_dim": 8,
        "num_hidden_layers": 6,
        "sliding_window": WINDOW,
        "global_head_dim": 16,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
    },
    "starcoder2": SHAPE,
    "stablelm": {**SHAPE, "partial_rotary_factor": 0.5},
    "olmo": {**SHAPE, "pad_token_id": 0, "clip_qkv": 0.5},
    "ministral": {**SHAPE, "head_dim": 8, "sliding_window": WINDOW},
    "cohere": {**SHAPE, "logit_scale": 0.5},
    "cohere2": {**SHAPE, "num_hidden_layers": 4, "sliding_window": WINDOW, "logit_scale": 0.5},
    "cohere2_moe": {
        **SHAPE,
        **EXPERTS,
        "num_hidden_layers": 4,
        "head_dim": 8,
        "first_k_dense_replace": 1,
        "prefix_dense_intermediate_size": 40,
        "sliding_window_pattern": 2,
        "sliding_window": WINDOW,
        "logit_scale": 0.5,
        "num_shared_experts": 1,
        "shared_expert_combination_strategy": "sum",
        "pad_token_id": 0,
        "eos_token_id": 1,
    },
    "gpt_neox": {key: value for key, value in SHAPE.items() if key != "num_key_value_heads"},
    "ernie4_5": {**SHAPE, "head_dim": 8},
    "glm4": {**SHAPE, "head_dim": 8, "pad_token_id": 0, "eos_token_id": 1},
    "exaone4": {**SHAPE, "num_hidden_layers": 4, "sliding_window": WINDOW},
    "seed_oss": {**SHAPE, "head_dim": 8, "pad_token_id": 0},
    "gpt2": {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
}
WINDOWS = {
    "mistral": {"sliding_window": WINDOW},
    "mixtral": {"sliding_window": WINDOW},
    "qwen3": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    "qwen3_moe": {"use_sliding_window": True, "sliding_window": WINDOW},
}
EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}
TOKENS = torch.randint(0, 97, (2, 64), generator=torch.Generator().manual_seed(1))


@contextmanager
def fp32_as_fp64():
    """Let transformers compute norms, positions and routers in fp64, which it does in fp32 whatever the dtype."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "float32", torch.float64)
        patch.setattr(torch, "float", torch.float64)
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        yield


@contextmanager
def fp64_by_default():
    """Let new tensors be in fp64: scales that are buffers."""
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.fixture(autouse=True)
def _quiet():
    import transformers

    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    # Its auto classes have these text models inside wrappers only.
    wrappers = ("MuseGlimmerForConditionalGeneration", "Step3p7ForConditionalGeneration")
    for model in ("Mistral4ForCausalLM", *wrappers):
        model_class = getattr(transformers, model)
        transformers.AutoModelForCausalLM.register(model_class.config_class, model_class, exist_ok=True)


def save_random_model(directory: Path, kind: str, seed: int = 0, **config) -> Path:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    whole = wrapped_config({**KINDS[kind], **config, "model_type": kind})
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**whole)).double()
    carried = ("e_score_correction_bias", "expert_bias", "layer_scalar")
    biases = [buffer for name, buffer in model.named_buffers() if name.endswith(carried)]
    for parameter in (*model.parameters(), *biases):
        parameter.data += 0.3 * torch.randn_like(parameter)
    model.save_pretrained(directory)
    return directory


def publish_olmo_hybrid(directory: Path) -> None:
    """Rename the norms of layers with attention, which transformers saves under the name of another, as published."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    for name in [name for name in tensors if name.endswith("post_feedforward_layernorm.weight")]:
        layer = name.removesuffix("post_feedforward_layernorm.weight")
        tensors[f"{layer}post_attention_layernorm.weight"] = tensors.pop(f"{layer}feedforward_layer_norm.weight")
    save_file(tensors, file, metadata={"format": "pt"})


def edit_config(directory: Path, *dropped: str, **changes) -> None:
    file = directory / "config.json"
    whole = json.loads(file.read_text())
    config = whole.get("text_config", whole)
    for field in dropped:
        config.pop(field, None)
    config.update(changes)
    file.write_text(json.dumps(whole))


def transformers_logits(directory: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    with fp64_by_default(), fp32_as_fp64(), torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64, **EAGER).eval()(TOKENS).logits


def phalanx_logits(directory: Path, **changes) -> torch.Tensor:
    with torch.no_grad():
        return load_model(directory, **changes)(TOKENS)[0]


def assert_logits_equal(directory: Path, **changes) -> None:
    expected = transformers_logits(directory)
    assert expected.std() > 0.3
    torch.testing.assert_close(phalanx_logits(directory, **changes), expected, rtol=0, atol=1e-10)


def add_tensor(directory: Path, name: str, tensor: torch.Tensor) -> None:
    file = directory / "model.safetensors"
    save_file({**load_file(file), name: tensor}, file, metadata={"format": "pt"})


GEMMA4_E2B = {
    "layer_types": 2 * ["sliding_attention", "sliding_attention", "full_attention"],
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 12,
    "vocab_size_per_layer_input": 97,
    "attention_k_eq_v": False,
}
GEMMA4_EXPERTS = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24}
VARIANTS = {
    "granitemoehybrid": {
        "num_local_experts": 0,
        "position_embedding_type": "rope",
        "mamba_n_heads": 4,
        "mamba_n_groups": 2,
        "mamba_d_state": 16,
        "mamba_d_conv": 3,
        "mamba_chunk_size": 32,
        "mamba_conv_bias": False,
        "mamba_proj_bias": True,
        "time_step_limit": [0.4, 1.1],
    },
    "nemotron_h": {
        "hybrid_override_pattern": "*M-M",
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "n_groups": 4,
        "ssm_state_size": 16,
        "conv_kernel": 3,
        "chunk_size": 32,
        "use_conv_bias": False,
        "use_bias": True,
        "time_step_min": 0.6,
        "time_step_limit": [0.9, 1.0],
    },
    "kimi_linear": {
        "q_lora_rank": 24,
        "attention_bias": True,
        "linear_num_heads": 3,
        "linear_head_dim": 16,
        "linear_conv_kernel_dim": 3,
        "layer_types": ["full_attention", "linear_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse", "dense"],
    },
    "bailing_hybrid": {
        "q_lora_rank": 24,
        "attention_bias": True,
        "head_dim": 16,
        "short_conv_kernel_size": 3,
        "layer_types": ["full_attention", "linear_attention", "full_attention"],
        "mlp_layer_types": ["dense", "dense", "sparse"],
        "kda_lower_bound": -2.0,
        "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.4},
    },
    "bailing_hybrid with decays without a bound": {"kda_safe_gate": False},
    "deepseek_v2": {"topk_method": "greedy", "q_lora_rank": None, "attention_bias": True},
    "deepseek_v3": {"q_lora_rank": None, "attention_bias": True, "v_head_dim": 12},
    "qwen3_next": {
        "num_hidden_layers": 4,
        "linear_num_key_heads": 3,
        "linear_key_head_dim": 4,
        "linear_value_head_dim": 6,
        "linear_conv_kernel_dim": 3,
        "partial_rotary_factor": 0.25,
    },
    "qwen3_5_text": {"num_hidden_layers": 1, "layer_types": ["full_attention"]},
    "qwen3_5_moe_text": {"num_hidden_layers": 2, "layer_types": ["full_attention", "linear_attention"]},
    "lfm2": {"conv_bias": True, "block_auto_adjust_ff_dim": False, "layer_types": ["full_attention", "conv", "conv"]},
    "gpt_neox": {"use_parallel_residual": False},
    "muse_glimmer_text": {
        "layer_types": ["full_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "layer_rope_theta": [1e4, 1e4, 0, 0, 1e4],
        "rope_parameters": {"rope_type": "linear", "rope_theta": 1e5, "factor": 2.0},
        "tie_word_embeddings": True,
    },
    "step3p5": {
        "layer_types": None,
        "moe_layers_enum": None,
        "swiglu_limits": [0.0] * 5,
        "swiglu_limits_shared": None,
        "rope_theta": 1e5,
        "partial_rotary_factors": None,
        "query_pre_attn_scalar": 12,
    },
    "mimo_v2_flash": {
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "mlp_layer_types": ["sparse", "dense", "sparse", "dense"],
        "routed_scaling_factor": 2.5,
        "attention_value_scale": None,
        "rope_parameters": {
            "full_attention": {**YARN, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
        },
    },
    "laguna": {
        "layer_types": None,
        "mlp_layer_types": ["sparse", "dense", "sparse", "dense"],
        "num_attention_heads_per_layer": None,
        "gating": "per-head",
        "rope_parameters": {"full_attention": {**YARN, "rope_theta": 1e6, "partial_rotary_factor": 0.5}},
    },
    "apertus": {"attention_bias": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1e5}},
    "afmoe": {
        "layer_types": ["full_attention", "sliding_attention", "full_attention", "sliding_attention"],
        "num_dense_layers": 2,
        "mup_enabled": False,
    },
    "llama4_text": {
        "no_rope_layers": [1, 0, 0, 1],
        "layer_types": ["full_attention", "chunked_attention", "full_attention", "chunked_attention"],
        "moe_layers": [0, 3],
        "attention_chunk_size": 24,
        "use_qk_norm": False,
        "floor_scale": 4,
        "attn_scale": 0.9,
    },
    "llama4_text without chunks and temperature": {"attention_chunk_size": None, "attn_temperature_tuning": False},
    "llama4_text with two shares of layers": {"no_rope_layer_interval": 2, "interleave_moe_layer_step": 1},
    "ministral": {"layer_types": ["full_attention", "sliding_attention"]},
    "olmo_hybrid": {
        "layer_types": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": None},
        "linear_num_value_heads": 6,
        "linear_key_head_dim": None,
        "linear_value_head_dim": None,
        "linear_conv_kernel_dim": 3,
        "linear_allow_neg_eigval": False,
    },
    "stablelm": {"use_parallel_residual": True, "use_qkv_bias": True, "qk_layernorm": True},
    "cohere": {"use_qk_norm": True},
    "cohere2_moe": {
        "first_k_dense_replace": 2,
        "prefix_dense_sliding_window_pattern": 2,
        "rms_norm_eps": 1e-3,
        "num_shared_experts": 0,
        "shared_expert_combination_strategy": "average",
        "expert_selection_fn": "sigmoid",
        "norm_topk_prob": False,
    },
    "cohere2_moe with normalized sigmoids": {"expert_selection_fn": "sigmoid", "layer_norm_eps": 1e-3},
    "gemma4_text": {"attention_k_eq_v": False, "attention_bias": True, "rope_parameters": None},
    "gemma4_text with experts": GEMMA4_EXPERTS,
    "gemma4_text with shared keys and inputs of layers": GEMMA4_E2B,
    "gemma4_text with experts, shared keys and inputs of layers": {
        **(GEMMA4_E2B | GEMMA4_EXPERTS),
        "num_kv_shared_layers": 2,
        "attention_k_eq_v": True,
        "use_double_wide_mlp": False,
    },
    "dots1": {"sliding_window": WINDOW, "max_window_layers": 2, "attention_bias": True},
    "hy_v3": {"attention_bias": True, "mlp_layer_types": ["dense", "dense", "sparse"]},
    "solar_open": {"attention_bias": True},
    "ernie4_5_moe": {"moe_num_shared_experts": 0},
    "exaone_moe": {"first_k_dense_replace": 2},
    "lfm2_moe": {"use_expert_bias": False, "norm_topk_prob": False, "conv_bias": True},
    "lfm3": {
        "num_hidden_layers": 5,
        "layer_types": None,
        "rope_parameters": None,
        "conv_bias": True,
        "attention_bias": True,
        "use_sandwich_norm": False,
        "use_attention_gate": False,
    },
    "exaone4": {"sliding_window": None, "layer_types": ["full_attention"] * 4},
    "falcon_h1": {
        "mamba_rms_norm": True,
        "mamba_norm_before_gate": False,
        "mamba_n_groups": 2,
        "mamba_d_ssm": None,
        "mamba_n_heads": 4,
        "mamba_conv_bias": False,
        "time_step_limit": [0.4, 1.1],
    },
    "falcon_h1 without factors": dict.fromkeys(("mlp_multipliers", "ssm_multipliers")),
    "seed_oss": {"attention_out_bias": True},
    "smollm3": {"attention_bias": True, "no_rope_layers": [0, 1, 1, 0]},
    "minimax_m3_vl_text": {
        "layer_types": None,
        "mlp_layer_types": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    "gemma3_text": {"query_pre_attn_scalar": 8, "layer_types": ["full_attention", *["sliding_attention"] * 5]},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variant_of_a_family_equals_transformers(tmp_path, name):
    assert_logits_equal(save_random_model(tmp_path, name.partition(" ")[0], **VARIANTS[name]))


def test_more_tokens_than_an_indexer_chooses_are_refused(tmp_path):
    model = load_model(save_random_model(tmp_path, "deepseek_v32", index_topk=32))
    with pytest.raises(UserError, match=r"tokens = 64 exceeds model\.mixer\.indexer\.top_k \(32\)"):
        model(TOKENS)


def test_more_blocks_than_an_indexer_chooses_are_refused(tmp_path):
    model = load_model(save_random_model(tmp_path, "minimax_m3_vl_text", index_topk_blocks=3))
    with pytest.raises(UserError, match=r"tokens = 64 exceeds model\.indexer\.block_size x top_blocks \(48\)"):
        model(TOKENS)


def test_rotated_width_that_transformers_ignores_is_refused(tmp_path):
    save_random_model(tmp_path, "minimax_m3_vl_text")
    edit_config(tmp_path, rotary_dim=8)
    with pytest.raises(UserError, match="by which transformers rotates 12 channels"):
        load_model_spec(str(tmp_path))


def test_keys_of_layers_that_read_others_are_ignored(tmp_path):
    """Published files have them."""
    expected = phalanx_logits(save_random_model(tmp_path, "gemma4_text", **GEMMA4_E2B))
    for name in ("k_proj", "v_proj", "k_norm"):
        add_tensor(tmp_path, f"model.layers.4.self_attn.{name}.weight", torch.ones(4))
    assert torch.equal(phalanx_logits(tmp_path), expected)
    add_tensor(tmp_path, "model.layers.4.self_attn.other.weight", torch.ones(4))
    with pytest.raises(UserError, match=r"layers\.4\.self_attn\.other\.weight' is not used by the model"):
        phalanx_logits(tmp_path)


def test_table_of_inputs_of_layers_has_as_many_rows_as_the_embedding(tmp_path):
    edit_config(save_random_model(tmp_path, "gemma4_text", **GEMMA4_E2B), vocab_size_per_layer_input=96)
    with pytest.raises(UserError, match="vocab_size_per_layer_input = 96 is not supported"):
        load_model(tmp_path)


def test_type_of_kimi_k2_is_that_of_deepseek_v3_with_another_name(tmp_path):
    directory = save_random_model(tmp_path, "deepseek_v3")
    expected = phalanx_logits(directory)
    edit_config(directory, model_type="kimi_k2")
    assert torch.equal(phalanx_logits(directory), expected)


def test_biases_of_routers_are_exported_in_fp32(tmp_path):
    model = load_model(save_random_model(tmp_path / "source", "glm4_moe"))
    export_hf(model.spec, dict(model.state_dict()), tmp_path / "bf16", dtype="bf16")
    tensors = load_file(tmp_path / "bf16" / "model.safetensors")
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert torch.equal(tensors[name], model.state_dict()["blocks.1.mlp.router.bias"].float())
    assert {tensor.dtype for other, tensor in tensors.items() if "bias" not in other} == {torch.bfloat16}


@pytest.mark.parametrize("kind", ["qwen3_5_text", "kimi_linear"])
def test_rates_of_decay_are_exported_in_fp32(tmp_path, kind):
    model = load_model(save_random_model(tmp_path / "source", kind))
    export_hf(model.spec, dict(model.state_dict()), tmp_path / "bf16", dtype="bf16")
    tensors = load_file(tmp_path / "bf16" / "model.safetensors")
    is_fp32 = {name.rpartition(".")[2] for name, tensor in tensors.items() if tensor.dtype == torch.float32}
    assert is_fp32 - {"e_score_correction_bias"} == {"A_log", "dt_bias"}


def test_published_words_of_kimi_linear_equal_transformers(tmp_path):
    """Lists of layers count from 1, and dense layers have other names than transformers gives them."""
    save_random_model(tmp_path, "kimi_linear", linear_conv_kernel_dim=3)
    words = ("layer_types", "mlp_layer_types", "linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim")
    sizes = {"num_heads": 4, "head_dim": 8, "short_conv_kernel_size": 3}
    edit_config(
        tmp_path,
        *(*words, "qk_head_dim", "num_experts_per_token"),
        linear_attn_config={"full_attn_layers": [3], "kda_layers": [1, 2], **sizes},
        head_dim=8,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        rope_scaling=None,
        rope_theta=1e4,
        mla_use_nope=True,
        moe_layer_freq=1,
        use_grouped_topk=True,
    )
    file = tmp_path / "model.safetensors"
    dense = "layers.0.block_sparse_moe."
    renamed = {name.replace(dense, "layers.0.mlp."): tensor for name, tensor in load_file(file).items()}
    save_file(renamed, file, metadata={"format": "pt"})
    assert_logits_equal(tmp_path)


def pop_stacks(tensors: dict[str, torch.Tensor], experts: str) -> Iterator[torch.Tensor]:
    """Take the matrices of four experts out of the tensors of a checkpoint, and yield the three stacks of them."""
    for name in ("gate", "up", "down"):
        yield torch.stack([tensors.pop(f"{experts}.{expert}.{name}_proj.weight") for expert in range(4)])


def test_constants_that_are_tensors_must_be_those_of_the_formula(tmp_path):
    add_tensor(save_random_model(tmp_path, "apertus"), "model.layers.1.mlp.act_fn.beta", torch.tensor(0.25))
    with pytest.raises(UserError, match=r"model\.layers\.1\.mlp\.act_fn\.beta.* is not 0\.5"):
        load_model(tmp_path)


def test_stacked_experts_of_a_multimodal_file_equal_transformers(tmp_path):
    """Published files of Qwen3.5 have stacks of experts, transformers saves each."""
    expected = transformers_logits(save_random_model(tmp_path, "qwen3_5_moe_text"))
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for layer in range(3):
        experts = f"model.layers.{layer}.mlp.experts"
        gate, up, down = pop_stacks(tensors, experts)
        tensors[f"{experts}.gate_up_proj"] = torch.cat([gate, up], dim=1)
        tensors[f"{experts}.down_proj"] = down
    renamed = {name.replace("model.", "model.language_model."): tensor for name, tensor in tensors.items()}
    others = {"model.visual.patch_embed.proj.bias": torch.ones(2), "mtp.fc.weight": torch.ones(2)}
    save_file(renamed | others, file, metadata={"format": "pt"})
    text = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_5_moe", "text_config": text}))
    torch.testing.assert_close(phalanx_logits(tmp_path), expected, rtol=0, atol=1e-10)


def test_decays_of_states_are_exported_in_fp32(tmp_path):
    model = load_model(save_random_model(tmp_path / "source", "granitemoehybrid"))
    export_hf(model.spec, dict(model.state_dict()), tmp_path / "bf16", dtype="bf16")
    tensors = load_file(tmp_path / "bf16" / "model.safetensors")
    in_fp32 = {name for name, tensor in tensors.items() if tensor.dtype == torch.float32}
    leaves = ("A_log", "D", "dt_bias")
    assert in_fp32 == {f"model.layers.{layer}.mamba.{leaf}" for layer in (0, 2) for leaf in leaves}


def test_layers_of_one_branch_are_read_from_the_pattern_of_published_models(tmp_path):
    save_random_model(tmp_path, "nemotron_h")
    edit_config(tmp_path, "layers_block_type", hybrid_override_pattern="ME*-M", num_hidden_layers=5)
    add_tensor(tmp_path, "mtp.layers.0.norm.weight", torch.ones(4))
    assert_logits_equal(tmp_path)


def test_older_words_of_layers_of_granite_equal_transformers(tmp_path):
    save_random_model(tmp_path, "granitemoehybrid")
    limits = {"time_step_limit": [0.0, float("inf")], "position_embedding_type": "nope"}
    edit_config(tmp_path, "rope_parameters", layer_types=["mamba", "attention", "mamba"], rope_theta=1e4, **limits)
    assert_logits_equal(tmp_path)


def test_prediction_layers_are_not_read_but_a_missing_layer_is_noticed(tmp_path):
    add_tensor(save_random_model(tmp_path, "glm4_moe"), "model.layers.3.eh_proj.weight", torch.ones(4))
    edit_config(tmp_path, num_nextn_predict_layers=1)
    model = load_model(tmp_path)
    export_hf(model.spec, dict(model.state_dict()), tmp_path / "out", source=tmp_path)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_nextn_predict_layers"] == 0
    with pytest.raises(UserError, match=r"model\.layers\.2.* is not used by the model"):
        load_model(tmp_path, num_layers=2)


def test_as_many_prediction_layers_as_config_json_counts_are_not_read(tmp_path):
    save_random_model(tmp_path, "step3p5")
    for layer in (5, 6):
        add_tensor(tmp_path, f"model.layers.{layer}.eh_proj.weight", torch.ones(4))
    edit_config(tmp_path, num_nextn_predict_layers=2)
    load_model(tmp_path)
    edit_config(tmp_path, num_nextn_predict_layers=1)
    with pytest.raises(UserError, match=r"model\.layers\.6\.eh_proj.* is not used by the model"):
        load_model(tmp_path)


VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
KIMI_VISION = {name: size for name, size in VISION.items() if name != "image_size"} | {
    "pos_emb_height": 4,
    "pos_emb_width": 4,
    "pos_emb_time": 2,
}
TOWER = {
    "depth": 1,
    "hidden_size": 16,
    "num_heads": 2,
    "intermediate_size": 16,
    "patch_size": 4,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
}
WRAPPERS = {
    "step3p7": (VISION | {"mlp_ratio": 1.0, "image_size": 56}, {}),
    "muse_glimmer": (VISION | {"pos_emb_height": 2, "pos_emb_width": 2}, {}),
    "qwen3_5": (TOWER, {}),
    "qwen3_5_moe": (TOWER, {}),
    "gemma3": (VISION, {"mm_tokens_per_image": 4}),
    "gemma4": (VISION | {"num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 16}, {}),
    "llama4": (VISION, {}),
    "mistral3": (VISION | {"model_type": "pixtral"}, {}),
    "minimax_m3_vl": (VISION, {"projector_hidden_size": 32}),
    "kimi_k25": (KIMI_VISION, {"tie_word_embeddings": False}),
    "qwen2_5_vl": (TOWER, {}),
    "qwen3_vl": (TOWER | {"deepstack_visual_indexes": [0]}, {}),
    "qwen3_vl_moe": (TOWER | {"deepstack_visual_indexes": [0]}, {}),
}
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
TEXT_KINDS = {
    **{name: family.wrapper for name, family in families().items() if family.wrapper},
    **{table["model_type"]: wrapper for wrapper, table in PLAIN_TEXT_TYPES.items()},
}
"""Wrappers by the type of their text model."""


@pytest.mark.parametrize(
    ("text_kind", "fields_of_text"),
    [*((text_kind, {}) for text_kind in TEXT_KINDS), ("gemma4_text", GEMMA4_E2B)],
    ids=[*TEXT_KINDS, "gemma4_text with shared keys and inputs of layers"],
)
def test_text_model_of_a_multimodal_model_equals_transformers(tmp_path, text_kind, fields_of_text):
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    kind = TEXT_KINDS[text_kind]
    vision, fields = WRAPPERS[kind]
    text = {**KINDS[text_kind], **fields_of_text, "model_type": text_kind}
    if kind in PLAIN_TEXT_TYPES:
        text |= {"model_type": f"{kind}_text", **MROPE}
    config = AutoConfig.for_model(kind, text_config=text, vision_config=vision, **fields)
    torch.manual_seed(0)
    with fp64_by_default(), fp32_as_fp64(), torch.no_grad():
        model = AutoModelForImageTextToText.from_config(config, **EAGER).double().eval()
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
        # The forward pass of llama4 itself fails in transformers 5.24.
        expected = (model.language_model if kind == "llama4" else model)(TOKENS).logits
    model.save_pretrained(tmp_path / "whole")
    ours = load_model(tmp_path / "whole")
    with torch.no_grad():
        torch.testing.assert_close(ours(TOKENS)[0], expected, rtol=0, atol=1e-10)
    export_hf(ours.spec, dict(ours.state_dict()), tmp_path / "text", source=tmp_path / "whole")
    exported_kind = text_kind if families()[text_kind].exported_tower is None else kind
    assert json.loads((tmp_path / "text" / "config.json").read_text())["model_type"] == exported_kind
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "text")
    torch.testing.assert_close(exported(TOKENS).logits.double(), expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("transposed", [False, True])
def test_stacked_experts_of_qwen3_vl_are_read_in_both_forms(tmp_path, transposed):
    save_random_model(tmp_path, "qwen3_moe")
    expected = phalanx_logits(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for layer in range(2):
        experts = f"model.layers.{layer}.mlp.experts"
        gate, up, down = pop_stacks(tensors, experts)
        for name, stack in (("gate_up_proj", torch.cat((gate, up), dim=1)), ("down_proj", down)):
            tensors[f"{experts}.{name}"] = stack.mT.contiguous() if transposed else stack
    save_file(tensors, file, metadata={"format": "pt"})
    assert torch.equal(phalanx_logits(tmp_path), expected)


def test_logits_of_every_family_are_compared():
    assert KINDS.keys() == families().keys()
    assert WRAPPERS.keys() == set(TEXT_KINDS.values())


@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_transformers(tmp_path, kind):
    assert_logits_equal(save_random_model(tmp_path, kind))


@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_transformers_when_every_field_is_altered(tmp_path, kind):
    altered = altered_fields(kind, KINDS[kind])
    num_layers = KINDS[kind].get("num_hidden_layers")
    of_layers = {
        name: value
        for name, value in KINDS[kind].items()
        if isinstance(value, list) and len(value) == num_layers and not name.endswith("multipliers")
    }
    altered |= {name: 2 * value for name, value in of_layers.items()}
    # In transformers, OLMoE's norms and Helium's output have the width of the model, whatever the width of heads.
    if kind in ("olmoe", "helium"):
        del altered["head_dim"]
    assert_logits_equal(save_random_model(tmp_path, kind, **altered))


REPEATING = ("gemma2", "gemma3_text", "gemma4_text", "starcoder2")
"""Random models of these families choose few tokens."""
WITHOUT_CACHE = ("nemotron_h",)
"""With its cache, transformers 5 chooses other tokens than without it."""


@pytest.mark.parametrize(
    ("kind", "fields"),
    [*((kind, {}) for kind in KINDS), ("gemma4_text", GEMMA4_E2B)],
    ids=[*KINDS, "gemma4_text with shared keys and inputs of layers"],
)
def test_generated_tokens_equal_those_of_transformers(tmp_path, kind, fields):
    from transformers import AutoModelForCausalLM

    save_random_model(tmp_path, kind, **fields)
    prompt = TOKENS[0, :12]
    with fp32_as_fp64(), torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64, **EAGER).eval()
        limits = {"min_new_tokens": 32, "max_new_tokens": 32, "pad_token_id": 0}
        limits["use_cache"] = kind not in WITHOUT_CACHE
        expected = theirs.generate(prompt[None], do_sample=False, **limits)[0]
    # min_new_tokens hides the end of text, which these models must not choose either.
    ends = theirs.generation_config.eos_token_id
    hidden = tuple(token for token in (ends if isinstance(ends, list) else [ends]) if token is not None and token < 97)
    generated = generate(load_model(tmp_path), prompt, 32, temperature=0, suppress_tokens=hidden)
    assert kind in REPEATING or len(set(generated[12:].tolist())) > 3
    assert torch.equal(generated, expected)


CONFIG_TRAPS = {
    "llama, rope_scaling next to rope_parameters": ("llama", (), {"rope_scaling": YARN}),
    "qwen3, rope_scaling next to rope_parameters": ("qwen3", (), {"rope_scaling": YARN}),
    "rope_scaling takes theta from the top level": (
        "llama",
        (),
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 5e5},
    ),
    "mixtral, rope_scaling takes the family's theta": ("mixtral", (), {"rope_scaling": YARN, "head_dim": 8}),
    "original length at the top level": ("llama", (), {"rope_scaling": YARN, "original_max_position_embeddings": 32}),
    "yarn factor from both lengths": ("llama", (), {"rope_scaling": YARN | {"factor": None}}),
    "yarn with a factor of attention": ("llama", (), {"rope_scaling": YARN | {"attention_factor": 0.8}}),
    "yarn with both scales of attention": (
        "llama",
        (),
        {"rope_scaling": YARN | {"mscale": 0.7, "mscale_all_dim": 0.4}},
    ),
    "yarn with one scale, which has no effect": ("llama", (), {"rope_scaling": YARN | {"mscale": 0.7}}),
    "yarn without whole channels": ("llama", (), {"rope_scaling": YARN | {"truncate": False}}),
    "olmo3, where transformers does not read truncate": (
        "olmo3",
        (),
        {"rope_scaling": YARN | {"rope_theta": 5e5, "truncate": False}},
    ),
    "deepseek_v3, where yarn has two scales": (
        "deepseek_v3",
        (),
        {"rope_scaling": YARN | {"type": "yarn", "mscale": 0.7, "mscale_all_dim": 0.4}},
    ),
    "deepseek_v3, words of the hub": (
        "deepseek_v3",
        ("head_dim", "qk_head_dim", "rope_interleave", "norm_topk_prob", "n_shared_experts"),
        {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1, "ep_size": 1},
    ),
    "bailing_hybrid, words of the hub": (
        "bailing_hybrid",
        (
            *("linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim", "layer_types", "mlp_layer_types"),
            *("model_max_length", "moe_renormalize", "num_expert_group", "num_experts_per_token", "rope_parameters"),
        ),
        {
            "head_dim": 8,
            "max_position_embeddings": 64,
            "norm_topk_prob": False,
            "n_group": 4,
            "num_experts_per_tok": 2,
            "rope_theta": 1e4,
            "rope_scaling": None,
            "rope_interleave": True,
            "no_kda_lora": True,
            "gated_attention_proj_granularity_type": "head_wise",
            "moe_shared_expert_intermediate_size": 24,
            "num_nextn_predict_layers": 1,
        },
    ),
    "mixtral without theta and eps": ("mixtral", ("rope_parameters", "rope_theta", "rms_norm_eps"), {}),
    "olmoe without eps": ("olmoe", ("rms_norm_eps",), {}),
    "gpt2 without eps and activation": ("gpt2", ("layer_norm_epsilon", "activation_function"), {}),
    "lfm2, adjusted width and old names": (
        "lfm2",
        ("layer_types", "tie_word_embeddings"),
        {"full_attn_idxs": [1], "tie_embedding": True, "conv_dim": 32, "block_use_swiglu": True},
    ),
    "qwen3_next with words of the hub": (
        "qwen3_next",
        ("layer_types", "norm_topk_prob", "rope_parameters"),
        {
            "full_attention_interval": 2,
            "rope_theta": 5e5,
            "rope_scaling": None,
            "partial_rotary_factor": 0.5,
            "use_sliding_window": False,
        },
    ),
    "qwen3_5 with fields of the hub": (
        "qwen3_5_text",
        (),
        {
            "attn_output_gate": True,
            "mamba_ssm_dtype": "float32",
            "mtp_num_hidden_layers": 0,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e6,
                "partial_rotary_factor": 0.5,
                "mrope_section": [1, 1, 0],
                "mrope_interleaved": True,
            },
        },
    ),
    "mimo_v2_flash, words of the hub": (
        "mimo_v2_flash",
        ("layer_types", "mlp_layer_types", "rope_parameters", "sliding_window"),
        {
            "hybrid_layer_pattern": [0, 1, 1, 1],
            "moe_layer_freq": [0, 1, 1, 1],
            "sliding_window": WINDOW - 1,
            "sliding_window_size": WINDOW - 1,
            "rope_theta": 5e6,
            "swa_rope_theta": 1e4,
            "partial_rotary_factor": 0.334,
            "routed_scaling_factor": None,
            "swa_num_key_value_heads": 2,
            "swa_v_head_dim": 8,
            "add_swa_attention_sink_bias": True,
            "add_full_attention_sink_bias": False,
            "n_shared_experts": None,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
        },
    ),
    "laguna, words of the hub": (
        "laguna",
        ("mlp_layer_types",),
        {
            "rope_parameters": {
                "full_attention": {**YARN, "rope_theta": 1e6, "partial_rotary_factor": 0.5, "beta_fast": 64.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
                "original_max_position_embeddings": 16,
            },
            "partial_rotary_factor": 0.5,
            "mlp_only_layers": [0],
            "gating_types": ["per_head"] * 4,
            "norm_topk_prob": True,
        },
    ),
    "step3p5, words of the hub": (
        "step3p5",
        (
            *("rope_parameters", "per_layer_config", "num_sliding_attention_heads", "mlp_layer_types"),
            *("num_key_value_heads", "n_routed_experts", "num_experts_per_tok"),
        ),
        {
            "layer_types": ["full_attention", *["sliding_attention"] * 3, "full_attention", *["sliding_attention"] * 2],
            "rope_theta": [5e6, *[1e4] * 3, 5e6, 1e4, 1e4],
            "partial_rotary_factors": [0.5, *[1.0] * 3, 0.5, 1.0, 1.0],
            "rope_scaling": {**YARN, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 32.0},
            "yarn_only_types": ["full_attention"],
            "moe_layers_enum": "1,2,4",
            "swiglu_limits": [0.0, None, 0.3, 0.3, 0.3, 0.0, 0.0],
            "swiglu_limits_shared": [0.0, 0.0, 0.5, 0.5, 0.0, 0.0, 0.0],
            "num_nextn_predict_layers": 2,
            "num_attention_groups": 2,
            "moe_num_experts": 8,
            "moe_top_k": 2,
            "attention_other_setting": {
                "attention_type": "sliding_attention",
                "num_attention_heads": 12,
                "num_attention_groups": 2,
                "head_dim": 8,
                "true_head_dim": 8,
            },
            "use_rope_layers": [],
        },
    ),
    "hunyuan with the rotary table of published files": (
        "hunyuan_v1_dense",
        ("rope_parameters",),
        {"rope_scaling": {"type": "dynamic", "alpha": 50.0, "factor": 1.0, "mscale": 1.0}, "rope_theta": 1e4},
    ),
    "gpt_oss without a rotary table": ("gpt_oss", ("rope_parameters", "layer_types"), {}),
    "gpt_oss, old names": (
        "gpt_oss",
        ("rope_parameters",),
        {
            "rope_theta": 5e5,
            "rope_scaling": YARN | {"truncate": False, "beta_fast": 16.0},
            "experts_per_token": 4,
            "initial_context_length": 4096,
        },
    ),
    "lfm3 with one theta for both tables": (
        "lfm3",
        (),
        {"rope_parameters": {"full_attention": {}, "sliding_attention": {}}, "rope_theta": 500.0},
    ),
    "olmo_hybrid without positions, as published": ("olmo_hybrid", ("rope_parameters",), {"rope_theta": None}),
    "olmo_hybrid without a table": ("olmo_hybrid", ("rope_parameters",), {}),
    "minimax_m3 with the tables of published files": (
        "minimax_m3_vl_text",
        (
            *("layer_types", "mlp_layer_types", "index_n_heads", "index_head_dim", "index_block_size"),
            *("index_topk_blocks", "index_local_blocks"),
        ),
        {
            "moe_layer_freq": [0, 1, 0],
            "sparse_attention_config": {
                "use_sparse_attention": True,
                "sparse_num_index_heads": 2,
                "sparse_index_dim": 16,
                "sparse_block_size": 16,
                "sparse_topk_blocks": 4,
                "sparse_init_block": 0,
                "sparse_local_block": 1,
                "sparse_score_type": "max",
                "sparse_attention_freq": [0, 1, 1],
                "sparse_disable_index_value": [0, 1, 1],
            },
            "hidden_act": "swigluoai",
            "use_gemma_norm": True,
            "scoring_func": "sigmoid",
            "n_shared_experts": 1,
        },
    ),
    "falcon_h1 with fields of published files": (
        "falcon_h1",
        ("rope_parameters", "mamba_d_head"),
        {
            "rope_theta": 1e11,
            "rope_scaling": None,
            "head_dim": 8,
            "attn_layer_indices": None,
            "mamba_use_mlp": True,
            "mlp_expansion_factor": 8,
        },
    ),
    "ministral3 without a table": ("ministral3", ("rope_parameters",), {}),
    "ministral3, type by its old name": (
        "ministral3",
        ("rope_parameters",),
        {
            "rope_scaling": {
                "type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "llama_4_scaling_beta": 0.3,
            },
            "rope_theta": 1e5,
        },
    ),
    "windows switched off": ("qwen3", ("layer_types",), {"sliding_window": 4, "use_sliding_window": False}),
}


@pytest.mark.parametrize("trap", CONFIG_TRAPS)
def test_logits_equal_transformers_when_config_leaves_out_or_repeats(tmp_path, trap):
    kind, dropped, changes = CONFIG_TRAPS[trap]
    edit_config(save_random_model(tmp_path, kind), *dropped, **changes)
    assert_logits_equal(tmp_path)


@pytest.mark.parametrize("kind", WINDOWS)
def test_logits_beyond_sliding_window_equal_transformers(tmp_path, kind):
    save_random_model(tmp_path, kind, **WINDOWS[kind])
    spec = load_model(tmp_path).spec
    assert (spec.max_seq_len, spec.sliding_window) == (64, WINDOW)
    assert TOKENS.shape[1] > WINDOW
    assert_logits_equal(tmp_path)
    without_window = phalanx_logits(tmp_path, sliding_window=None, full_attention_layers=[])
    difference = (transformers_logits(tmp_path) - without_window).abs().amax((0, 2))
    assert difference[:WINDOW].max() < 1e-10
    assert difference[WINDOW:].min() > 1e-3


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        *((kind, {}) for kind in KINDS),
        *WINDOWS.items(),
        ("gemma4_text", GEMMA4_EXPERTS),
        ("gemma4_text", GEMMA4_E2B),
        *((kind, VARIANTS[kind]) for kind in ("cohere", "stablelm")),
    ],
    ids=[
        *KINDS,
        *(f"{kind} with a window" for kind in WINDOWS),
        "gemma4_text with experts",
        "gemma4_text with shared keys and inputs of layers",
        *("cohere with norms of each head", "stablelm with norms of each head"),
    ],
)
def test_export_keeps_config_and_weights(tmp_path, kind, fields):
    source = save_random_model(tmp_path / "source", kind, **fields)
    if kind == "olmo_hybrid":
        publish_olmo_hybrid(source)
    model = load_model(source)
    export_hf(model.spec, dict(model.state_dict()), tmp_path / "out", source=source)
    kept, exported = (
        text_config(json.loads((directory / "config.json").read_text())) for directory in (source, tmp_path / "out")
    )
    is_wrapped = families()[kind].exported_tower is not None
    assert exported == (kept if is_wrapped else kept | {"dtype": "float32"})
    weights = [load_file(directory / "model.safetensors") for directory in (source, tmp_path / "out")]
    if is_wrapped:
        weights[0] = {name: tensor for name, tensor in weights[0].items() if not re.search("vision|projector", name)}
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(tensor.to(torch.float32), weights[1][name]) for name, tensor in weights[0].items())


def test_export_of_olmo_hybrid_has_convolutions_of_their_own_widths(tmp_path):
    """transformers 5.24 saves the three in equal parts, and joins them again."""
    from transformers import AutoModelForCausalLM

    source = save_random_model(tmp_path / "source", "olmo_hybrid", **VARIANTS["olmo_hybrid"])
    model = load_model(source)
    export_hf(model.spec, dict(model.state_dict()), tmp_path / "out", source=source)
    widths = [
        [len(tensors[f"model.layers.0.linear_attn.{name}_conv1d.weight"]) for name in "qkv"]
        for tensors in (load_file(directory / "model.safetensors") for directory in (source, tmp_path / "out"))
    ]
    assert widths == [[64, 64, 64], [24, 24, 144]]
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(exported(TOKENS).logits.double(), phalanx_logits(source), rtol=0, atol=1e-3)
    assert (phalanx_logits(tmp_path / "out") - phalanx_logits(source)).abs().max() < 1e-4


def test_single_file_is_read_before_older_index(tmp_path):
    from transformers import AutoModelForCausalLM

    older = save_random_model(tmp_path / "older", "llama", seed=5)
    AutoModelForCausalLM.from_pretrained(older).save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    newer = save_random_model(tmp_path / "newer", "llama")
    for file in (tmp_path / "shards").glob("model*"):
        shutil.copy(file, newer)
    assert (newer / "model.safetensors.index.json").is_file()
    assert_logits_equal(newer)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_differing_head_of_tied_model_is_rejected_or_untied(tmp_path, kind):
    edit_config(save_random_model(tmp_path, kind, tie_word_embeddings=False), tie_word_embeddings=True)
    with pytest.raises(UserError, match=r"lm_head\.weight.*\n.*tie_embeddings = false"):
        load_model(tmp_path)
    assert_logits_equal(tmp_path, tie_embeddings=False)


def test_equal_head_of_tied_model_is_accepted(tmp_path):
    save_random_model(tmp_path, "llama", tie_word_embeddings=True)
    tensors = load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" not in tensors
    add_tensor(tmp_path, "lm_head.weight", tensors["model.embed_tokens.weight"].clone())
    assert_logits_equal(tmp_path)


def test_rotary_tables_and_masks_of_old_files_are_ignored(tmp_path):
    add_tensor(save_random_model(tmp_path, "llama"), "model.layers.0.self_attn.rotary_emb.inv_freq", torch.ones(4))
    assert_logits_equal(tmp_path)


EXTRA_TENSORS = {
    "bias": ("model.layers.0.self_attn.q_proj.bias", "transformers drops it too"),
    "norm": ("model.layers.1.self_attn.q_norm.weight", "is not used by the model"),
    "layer": ("model.layers.2.mlp.up_proj.weight", "is not used by the model"),
    "other head": ("score.weight", "is not used by the model"),
}


@pytest.mark.parametrize("case", EXTRA_TENSORS)
def test_tensor_that_the_model_does_not_use_is_rejected_by_name(tmp_path, case):
    name, words = EXTRA_TENSORS[case]
    add_tensor(save_random_model(tmp_path, "llama"), name, torch.ones(4))
    with pytest.raises(UserError, match=rf"{name}.*{words}"):
        open_hf_weights(tmp_path, load_model_spec(str(tmp_path)))


@pytest.mark.parametrize("kind", KINDS)
def test_every_family_rejects_a_tensor_that_it_does_not_use(tmp_path, kind):
    add_tensor(save_random_model(tmp_path, kind), "model.layers.0.extra.weight", torch.ones(4))
    with pytest.raises(UserError, match=r"model\.layers\.0\.extra\.weight.*is not used by the model"):
        open_hf_weights(tmp_path, load_model_spec(str(tmp_path)))


def test_quantized_tensors_and_adapters_are_rejected(tmp_path):
    save_random_model(tmp_path, "llama")
    spec, shape = load_model_spec(str(tmp_path)), torch.Size([32])
    add_tensor(tmp_path, "model.norm.weight", torch.ones(shape, dtype=torch.int8))
    with pytest.raises(UserError, match=r"model\.norm\.weight.*quantized \(torch.int8\)"):
        open_hf_weights(tmp_path, spec)("norm.weight", shape)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match=r"adapter_config\.json"):
        open_hf_weights(tmp_path, spec)


def test_unknown_field_is_accepted_for_planning_and_rejected_with_weights(tmp_path):
    edit_config(save_random_model(tmp_path, "llama"), final_logit_softcapping=30.0)
    spec = load_model_spec(str(tmp_path))
    with pytest.raises(UserError, match=r"config.json final_logit_softcapping = 30\.0"):
        open_hf_weights(tmp_path, spec)

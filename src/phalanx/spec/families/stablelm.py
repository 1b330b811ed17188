"""StableLM."""

from __future__ import annotations

from dataclasses import replace

from phalanx.spec.families.family import Field, Read, Written
from phalanx.spec.families.forms import Rope
from phalanx.spec.families.llama import LLAMA, each_head_norm_tensors, query_heads

UNREAD = ("rms_norm_eps", "attention_bias", "head_dim")
STABLELM = replace(
    LLAMA,
    model_type="stablelm",
    architecture="StableLmForCausalLM",
    fields={name: field for name, field in LLAMA.fields.items() if name not in UNREAD}
    | {
        "vocab_size": Read("vocab_size", 50304),
        "hidden_size": Read("hidden_size", 2560),
        "intermediate_size": Read("ffn_hidden_size", 6912),
        "num_key_value_heads": Read("num_kv_heads", 32, unset=query_heads),
        "max_position_embeddings": Read("max_seq_len", 4096),
        "layer_norm_eps": Read("norm_eps", 1e-5),
        "rope_parameters": Rope(has_fraction=True, fraction=0.25),
        "partial_rotary_factor": Field(),
        "use_qkv_bias": Read("attention_bias", False, words={False: "none", True: "qkv"}),
        "use_parallel_residual": Read("parallel_residual", False, words={False: "none", True: "one_norm"}),
        "qk_layernorm": Read("qk_norm", False, words={False: "none", True: "each_head"}),
        "hidden_dropout": Written(0.0),
    },
    constants={"norm": "layernorm"},
    tensors=LLAMA.tensors
    | each_head_norm_tensors("q_layernorm.norms.{e}", "k_layernorm.norms.{e}")
    | {
        "model.norm.bias": "norm.bias",
        "model.layers.{i}.input_layernorm.bias": "attention_norm.bias",
        "model.layers.{i}.post_attention_layernorm.bias": "mlp_norm.bias",
    },
)

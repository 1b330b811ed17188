"""StarCoder2."""

from __future__ import annotations

from dataclasses import replace

from phalanx.spec.families.family import Field, Fixed, Read
from phalanx.spec.families.llama import LLAMA, query_heads

STARCODER2 = replace(
    LLAMA,
    model_type="starcoder2",
    architecture="Starcoder2ForCausalLM",
    fields={name: field for name, field in LLAMA.fields.items() if name != "rms_norm_eps"}
    | {
        "vocab_size": Read("vocab_size", 49152),
        "hidden_size": Read("hidden_size", 3072),
        "num_hidden_layers": Read("num_layers", 30),
        "num_attention_heads": Read("num_heads", 24),
        "num_key_value_heads": Read("num_kv_heads", 2, unset=query_heads),
        "intermediate_size": Read("ffn_hidden_size", 12288),
        "max_position_embeddings": Read("max_seq_len", 4096),
        "norm_epsilon": Read("norm_eps", 1e-5),
        "hidden_act": Read("activation", "gelu_pytorch_tanh", words={"gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}),
        "sliding_window": Read("sliding_window", None),
        "use_bias": Read("bias", True),
        "attention_bias": Fixed(False),
        "tie_word_embeddings": Read("tie_embeddings", True),
        **dict.fromkeys(
            ("residual_dropout", "embedding_dropout", "mlp_type", "norm_type", "activation_function"), Field()
        ),
    },
    constants={"norm": "layernorm"},
    tensors={name: stored for name, stored in LLAMA.tensors.items() if ".mlp." not in name}
    | {
        "model.norm.bias": "norm.bias",
        "model.layers.{i}.input_layernorm.bias": "attention_norm.bias",
        "model.layers.{i}.post_attention_layernorm.bias": "mlp_norm.bias",
        "model.layers.{i}.mlp.c_fc.weight": "mlp.up.weight",
        "model.layers.{i}.mlp.c_fc.bias": "mlp.up.bias",
        "model.layers.{i}.mlp.c_proj.weight": "mlp.down.weight",
        "model.layers.{i}.mlp.c_proj.bias": "mlp.down.bias",
    },
)

"""GPT-2."""

from __future__ import annotations

from phalanx.spec.families.family import Family, Read, Rows, Written

GPT2 = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    fields={
        "vocab_size": Read("vocab_size", 50257),
        "n_embd": Read("hidden_size", 768),
        "n_layer": Read("num_layers", 12),
        "n_head": Read("num_heads", 12),
        "n_inner": Read("ffn_hidden_size", unset=lambda dials: 4 * dials["hidden_size"]),
        "n_positions": Read("max_seq_len", 1024),
        "n_ctx": Written(dial="max_seq_len"),
        "activation_function": Read(
            "activation",
            "gelu_new",
            words={"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"},
        ),
        "layer_norm_epsilon": Read("norm_eps", 1e-5),
        "tie_word_embeddings": Read("tie_embeddings", True),
        "torch_dtype": Written("float32"),
        "attn_pdrop": Written(0.0),
        "embd_pdrop": Written(0.0),
        "resid_pdrop": Written(0.0),
        "bos_token_id": Written(None),
        "eos_token_id": Written(None),
    },
    constants={"norm": "layernorm", "position_embedding": "learned", "bias": True},
    unused=("rope",),
    tensors={
        "transformer.wte.weight": "embedding.weight",
        "transformer.wpe.weight": "positions.weight",
        "transformer.ln_f.weight": "norm.weight",
        "transformer.ln_f.bias": "norm.bias",
        "lm_head.weight": "head.weight",
        "transformer.h.{i}.ln_1.weight": "attention_norm.weight",
        "transformer.h.{i}.ln_1.bias": "attention_norm.bias",
        "transformer.h.{i}.attn.c_attn.weight": Rows(
            "attention.wq.weight", "attention.wk.weight", "attention.wv.weight", transposed=True
        ),
        "transformer.h.{i}.attn.c_attn.bias": Rows("attention.wq.bias", "attention.wk.bias", "attention.wv.bias"),
        "transformer.h.{i}.attn.c_proj.weight": Rows("attention.wo.weight", transposed=True),
        "transformer.h.{i}.attn.c_proj.bias": "attention.wo.bias",
        "transformer.h.{i}.ln_2.weight": "mlp_norm.weight",
        "transformer.h.{i}.ln_2.bias": "mlp_norm.bias",
        "transformer.h.{i}.mlp.c_fc.weight": Rows("mlp.up.weight", transposed=True),
        "transformer.h.{i}.mlp.c_fc.bias": "mlp.up.bias",
        "transformer.h.{i}.mlp.c_proj.weight": Rows("mlp.down.weight", transposed=True),
        "transformer.h.{i}.mlp.c_proj.bias": "mlp.down.bias",
    },
    prefix="transformer.",
    ignored_tensors=("*h.*.attn.bias", "*h.*.attn.masked_bias"),
)

"""Llama, and what other families have in common with it."""

from __future__ import annotations

from phalanx.spec.families.family import (
    Family,
    Field,
    Fixed,
    Read,
    RowOrder,
    Rows,
    StoredTensors,
    Table,
    Written,
    rotated_pairs,
)
from phalanx.spec.families.forms import Rope


def query_heads(dials: Table) -> object:
    """Return the number of key/value heads of multi-head attention."""
    return dials["num_heads"]


def even_head_dim(dials: Table) -> object:
    """Return the width of a head if the heads share the width of the model."""
    return dials["hidden_size"] // dials["num_heads"]


ATTENTION_BIAS = Read("attention_bias", False, words={False: "none", True: "all", None: "none"})
CLIP = Read("attention_clip", None)
LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    fields={
        "vocab_size": Read("vocab_size", 32000),
        "hidden_size": Read("hidden_size", 4096),
        "num_hidden_layers": Read("num_layers", 32),
        "num_attention_heads": Read("num_heads", 32),
        "num_key_value_heads": Read("num_kv_heads", None, unset=query_heads),
        "head_dim": Read("head_dim", None, unset=even_head_dim),
        "intermediate_size": Read("ffn_hidden_size", 11008),
        "max_position_embeddings": Read("max_seq_len", 2048),
        "rms_norm_eps": Read("norm_eps", 1e-6),
        "hidden_act": Fixed("silu"),
        "tie_word_embeddings": Read("tie_embeddings", False),
        "attention_bias": ATTENTION_BIAS,
        "rope_parameters": Rope(),
        "torch_dtype": Written("float32"),
        "bos_token_id": Written(None),
        "eos_token_id": Written(None),
        "pad_token_id": Written(None),
    },
    constants={"qk_norm": "none"},
    tensors={
        "model.embed_tokens.weight": "embedding.weight",
        "model.norm.weight": "norm.weight",
        "lm_head.weight": "head.weight",
        "model.layers.{i}.input_layernorm.weight": "attention_norm.weight",
        "model.layers.{i}.self_attn.q_proj.weight": "attention.wq.weight",
        "model.layers.{i}.self_attn.k_proj.weight": "attention.wk.weight",
        "model.layers.{i}.self_attn.v_proj.weight": "attention.wv.weight",
        "model.layers.{i}.self_attn.o_proj.weight": "attention.wo.weight",
        **{f"model.layers.{{i}}.self_attn.{name}_proj.bias": f"attention.w{name}.bias" for name in "qkvo"},
        "model.layers.{i}.post_attention_layernorm.weight": "mlp_norm.weight",
        "model.layers.{i}.mlp.gate_proj.weight": "mlp.gate.weight",
        "model.layers.{i}.mlp.up_proj.weight": "mlp.up.weight",
        "model.layers.{i}.mlp.down_proj.weight": "mlp.down.weight",
    },
)

QK_NORM_TENSORS: StoredTensors = {
    "model.layers.{i}.self_attn.q_norm.weight": "attention.q_norm.weight",
    "model.layers.{i}.self_attn.k_norm.weight": "attention.k_norm.weight",
}
"""Norms of queries and keys, where a family has them."""


def each_head_norm_tensors(q_norm: str, k_norm: str, order: RowOrder | None = None) -> StoredTensors:
    """Return the norms of queries and keys with a weight of each head, by the names of their modules.

    One tensor has the weights of all heads, unless the names have {e}: then each is a tensor of its own."""
    return {
        f"model.layers.{{i}}.self_attn.{hf_name}.weight": Rows(
            f"attention.{name}.weight", stacked="{e}" not in hf_name, order=order
        )
        for hf_name, name in {q_norm: "q_norm", k_norm: "k_norm"}.items()
    }


INTERLEAVED_TENSORS: StoredTensors = {
    f"model.layers.{{i}}.self_attn.{name}_proj.{leaf}": Rows(f"attention.w{name}.{leaf}", order=rotated_pairs)
    for name in "qk"
    for leaf in ("weight", "bias")
}
"""Queries and keys, where neighboring channels are rotated together."""

EXPERT_TENSORS: StoredTensors = {
    "model.layers.{i}.mlp.gate.weight": "mlp.router.gate.weight",
    "model.layers.{i}.mlp.experts.{e}.gate_proj.weight": "mlp.experts.gate",
    "model.layers.{i}.mlp.experts.{e}.up_proj.weight": "mlp.experts.up",
    "model.layers.{i}.mlp.experts.{e}.down_proj.weight": "mlp.experts.down",
}
"""Router and experts in most families that have them."""


def shared_expert_tensors(prefix: str) -> StoredTensors:
    """Return the experts of all tokens, whose names in the checkpoint start like this."""
    return {f"{prefix}.{name}_proj.weight": f"mlp.shared.{name}.weight" for name in ("gate", "up", "down")}


SHARED_EXPERT_TENSORS = shared_expert_tensors("model.layers.{i}.mlp.shared_experts")
"""Experts of all tokens in most families that have them."""
SIGMOID_ROUTER: Table = {"moe.router_score": "sigmoid", "moe.choice_bias": True, "moe.z_loss_coef": 0.0}
"""Dials of families whose router is that of DeepSeek-V3: sigmoids, with a bias for the choice."""

EXPERT_FIELDS: dict[str, Field] = {
    "num_experts_per_tok": Read("moe.top_k", 8),
    "router_aux_loss_coef": Read("moe.balance_loss_coef", 0.001),
    "num_experts": Read("moe.num_experts", 128, other_names=("num_local_experts",)),
    "norm_topk_prob": Read("moe.normalize_top_k", False, words={True: True, False: False, None: False}),
}
"""Fields of the router in these families."""

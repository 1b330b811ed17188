"""LFM2: short convolutions in most layers, and experts in LFM2-MoE."""

from __future__ import annotations

from dataclasses import replace

from phalanx.spec.families.family import Family, Field, Read, Rows, Table, any_value
from phalanx.spec.families.forms import LayerKind, LayerTypes, OfKind, Rope
from phalanx.spec.families.llama import even_head_dim, query_heads
from phalanx.spec.model import ModelSpec

CONVOLUTION = LayerKind(
    "conv",
    lambda layer: layer.mixer is not None and layer.mixer.kind == "short_convolution",
    {"mixer.kind": "short_convolution"},
)
ATTENTION = LayerKind("full", lambda layer: layer.mixer is None)
HARMLESS = (
    *("block_dim", "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale", "block_use_swiglu"),
    *("block_use_xavier_init", "conv_dim", "conv_dim_out", "conv_use_xavier_init", "num_heads", "theta", "use_pos_enc"),
)
"""Fields of published models that transformers does not read."""


ADJUSTED_WIDTH: Table = {
    "intermediate_size": 12288,
    "block_auto_adjust_ff_dim": True,
    "block_ffn_dim_multiplier": 1.0,
    "block_multiple_of": 256,
}
"""Defaults of the fields that give the inner width of the MLP."""


class AdjustedWidth(Field):
    """Inner width of the MLP, of which block_auto_adjust_ff_dim leaves two thirds, rounded up."""

    dials = any_value("ffn_hidden_size")
    other_names = ("block_ff_dim", *ADJUSTED_WIDTH)

    def read(self, name: str, config: Table, dials: Table) -> Table:
        """Return the width as transformers computes it."""
        fields = ADJUSTED_WIDTH | config
        width: int = fields.get("block_ff_dim") or fields[name]
        if fields["block_auto_adjust_ff_dim"]:
            width = int(2 * width / 3)
            if fields["block_ffn_dim_multiplier"] is not None:
                width = int(fields["block_ffn_dim_multiplier"] * width)
            multiple = fields["block_multiple_of"]
            width = -(-width // multiple) * multiple
        return {"ffn_hidden_size": width}

    def write(self, name: str, spec: ModelSpec) -> Table:
        """Return the width, which is not adjusted."""
        return {name: spec.ffn_hidden_size, "block_auto_adjust_ff_dim": False}


def layer_types(config: Table, dials: Table) -> list[str]:
    """Return the type of each layer from the indices of those with attention, by default all."""
    num_layers = dials["num_layers"]
    attention = config.get("full_attn_idxs")
    attention = range(num_layers) if attention is None else attention
    return ["full_attention" if layer in attention else "conv" for layer in range(num_layers)]


LFM2 = Family(
    model_type="lfm2",
    architecture="Lfm2ForCausalLM",
    fields={
        "vocab_size": Read("vocab_size", 65536),
        "hidden_size": Read("hidden_size", 2560),
        "num_hidden_layers": Read("num_layers", 32),
        "num_attention_heads": Read("num_heads", 32),
        "num_key_value_heads": Read("num_kv_heads", 8, unset=query_heads),
        "head_dim": Read("head_dim", None, unset=even_head_dim),
        "intermediate_size": AdjustedWidth(),
        "max_position_embeddings": Read("max_seq_len", 128_000),
        "norm_eps": Read("norm_eps", 1e-5),
        "tie_word_embeddings": Read("tie_embeddings", True, other_names=("tie_embedding",)),
        "rope_parameters": Rope(theta=1_000_000.0),
        "layer_types": LayerTypes({"conv": CONVOLUTION, "full_attention": ATTENTION}, layer_types, ("full_attn_idxs",)),
        "conv_L_cache": OfKind(CONVOLUTION, Read("mixer.kernel_size", 3)),
        "conv_bias": OfKind(CONVOLUTION, Read("mixer.bias", False)),
        **dict.fromkeys(HARMLESS, Field()),
    },
    constants={"qk_norm": "head"},
    tensors={
        "model.embed_tokens.weight": "embedding.weight",
        "model.embedding_norm.weight": "norm.weight",
        "lm_head.weight": "head.weight",
        "model.layers.{i}.operator_norm.weight": "attention_norm.weight",
        "model.layers.{i}.self_attn.q_proj.weight": "attention.wq.weight",
        "model.layers.{i}.self_attn.k_proj.weight": "attention.wk.weight",
        "model.layers.{i}.self_attn.v_proj.weight": "attention.wv.weight",
        "model.layers.{i}.self_attn.q_layernorm.weight": "attention.q_norm.weight",
        "model.layers.{i}.self_attn.k_layernorm.weight": "attention.k_norm.weight",
        "model.layers.{i}.self_attn.out_proj.weight": "attention.wo.weight",
        **{
            f"model.layers.{{i}}.conv.in_proj.{leaf}": Rows(
                *(f"attention.{name}.{leaf}" for name in ("input_gate", "output_gate", "values"))
            )
            for leaf in ("weight", "bias")
        },
        "model.layers.{i}.conv.conv.weight": Rows("attention.taps", unit_axes=(1,)),
        "model.layers.{i}.conv.conv.bias": "attention.bias",
        "model.layers.{i}.conv.out_proj.weight": "attention.out.weight",
        "model.layers.{i}.conv.out_proj.bias": "attention.out.bias",
        "model.layers.{i}.ffn_norm.weight": "mlp_norm.weight",
        "model.layers.{i}.feed_forward.w1.weight": "mlp.gate.weight",
        "model.layers.{i}.feed_forward.w3.weight": "mlp.up.weight",
        "model.layers.{i}.feed_forward.w2.weight": "mlp.down.weight",
    },
)

LFM2_MOE = replace(
    LFM2,
    model_type="lfm2_moe",
    architecture="Lfm2MoeForCausalLM",
    fields=LFM2.fields
    | {
        "hidden_size": Read("hidden_size", 2048),
        "intermediate_size": Read("ffn_hidden_size", 7168),
        "moe_intermediate_size": Read("moe.expert_ffn_size", 1792),
        "num_experts": Read("moe.num_experts", 32),
        "num_experts_per_tok": Read("moe.top_k", 4),
        "num_dense_layers": Read("moe.num_leading_dense_layers", 2),
        "use_expert_bias": Read("moe.choice_bias", True),
        "norm_topk_prob": Read("moe.normalize_top_k", True),
        "routed_scaling_factor": Read("moe.routed_scale", 1.0),
    },
    constants=LFM2.constants | {"moe.router_score": "sigmoid", "moe.weight_eps": 1e-6, "moe.z_loss_coef": 0.0},
    unused=("moe.balance_loss_coef", "moe.bias_update_rate"),
    tensors=LFM2.tensors
    | {
        "model.layers.{i}.feed_forward.gate.weight": "mlp.router.gate.weight",
        "model.layers.{i}.feed_forward.expert_bias": "mlp.router.bias",
        "model.layers.{i}.feed_forward.experts.{e}.w1.weight": "mlp.experts.gate",
        "model.layers.{i}.feed_forward.experts.{e}.w3.weight": "mlp.experts.up",
        "model.layers.{i}.feed_forward.experts.{e}.w2.weight": "mlp.experts.down",
    },
)

"""ERNIE 4.5."""

from __future__ import annotations

from dataclasses import replace

from phalanx.spec.families.family import Field, Fixed, Read, Rows, Table, Written, require_value
from phalanx.spec.families.forms import Rope
from phalanx.spec.families.llama import (
    EXPERT_TENSORS,
    INTERLEAVED_TENSORS,
    LLAMA,
    SHARED_EXPERT_TENSORS,
    even_head_dim,
    query_heads,
)

ERNIE4_5 = replace(
    LLAMA,
    model_type="ernie4_5",
    architecture="Ernie4_5ForCausalLM",
    fields=LLAMA.fields
    | {
        "vocab_size": Read("vocab_size", 103424),
        "hidden_size": Read("hidden_size", 1024),
        "num_hidden_layers": Read("num_layers", 18),
        "num_attention_heads": Read("num_heads", 16),
        "num_key_value_heads": Read("num_kv_heads", 2, unset=query_heads),
        "head_dim": Read("head_dim", 128, unset=even_head_dim),
        "intermediate_size": Read("ffn_hidden_size", 3072),
        "max_position_embeddings": Read("max_seq_len", 131072),
        "rms_norm_eps": Read("norm_eps", 1e-5),
        "tie_word_embeddings": Read("tie_embeddings", True),
        "rope_parameters": Rope(theta=500_000.0),
        "attention_bias": Fixed(False),
        "use_bias": Fixed(False),
    },
    tensors=LLAMA.tensors | INTERLEAVED_TENSORS,
)


class LastExperts(Field):
    """Last layer with experts, which must be the last one: its index, or -1."""

    def read(self, name: str, config: Table, dials: Table) -> Table:
        """Return no dials. Raises UserError for another layer."""
        if config.get(name) != -1:
            require_value(name, config.get(name), dials["num_layers"] - 1)
        return {}


ERNIE4_5_MOE = replace(
    ERNIE4_5,
    model_type="ernie4_5_moe",
    architecture="Ernie4_5_MoeForCausalLM",
    fields=ERNIE4_5.fields
    | {
        "hidden_size": Read("hidden_size", 2560),
        "num_hidden_layers": Read("num_layers", 28),
        "num_attention_heads": Read("num_heads", 20),
        "num_key_value_heads": Read("num_kv_heads", 4, unset=query_heads),
        "head_dim": Read("head_dim", None, unset=even_head_dim),
        "intermediate_size": Read("ffn_hidden_size", 12288),
        "moe_num_experts": Read("moe.num_experts", 64, other_names=("num_experts",)),
        "moe_k": Read("moe.top_k", 6, other_names=("num_experts_per_tok",)),
        "moe_intermediate_size": Read("moe.expert_ffn_size", 1536),
        "moe_num_shared_experts": Read("moe.num_shared_experts", 2),
        "moe_layer_start_index": Read("moe.num_leading_dense_layers", 1),
        "moe_layer_end_index": LastExperts(),
        "moe_layer_interval": Fixed(1),
        "moe_norm_min": Fixed(1e-12),  # the weights of experts never add up to so little
        "moe_use_aux_free": Fixed(True),
        "moe_gate": Fixed("topk"),
        "router_aux_loss_coef": Read("moe.balance_loss_coef", 0.001),
        "num_nextn_predict_layers": Written(0),
        **dict.fromkeys(("moe_capacity", "multi_token_pred_lambda"), Field()),
    },
    constants=ERNIE4_5.constants | {"moe.choice_bias": True, "moe.z_loss_coef": 0.0},
    unused=("moe.bias_update_rate",),
    tensors=ERNIE4_5.tensors
    | EXPERT_TENSORS
    | SHARED_EXPERT_TENSORS
    | {"model.layers.{i}.mlp.moe_statics.e_score_correction_bias": Rows("mlp.router.bias", unit_axes=(0,))},
    ignored_tensors=(*LLAMA.ignored_tensors, "*mtp*"),
)

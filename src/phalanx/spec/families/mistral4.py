"""Mistral 4: latent attention, whose queries have a factor that grows with their position.

transformers loads an exported text model by its class; its auto classes have it inside mistral3 only."""

from __future__ import annotations

from dataclasses import replace

from phalanx.spec.families.deepseek import (
    DEEPSEEK_V3,
    LATENT,
    LATENT_FIELDS,
    LATENT_TENSORS,
    LatentRope,
    WidthWithoutRotation,
)
from phalanx.spec.families.family import Field, Read, Rows, SameAs, Table, require_value
from phalanx.spec.families.llama import LLAMA, SHARED_EXPERT_TENSORS
from phalanx.spec.families.ministral3 import DEFAULT_ROPE, RopeWithTemperature
from phalanx.spec.model import ModelSpec


class PartialLatentRope(RopeWithTemperature, LatentRope):
    """Rotary embedding of latent attention, whose table has the rotated share of a head."""

    def read(self, name: str, config: Table, dials: Table) -> Table:
        """Return the dials. Raises UserError for another share than that of the rotated channels."""
        without_share = dict(config)
        for table in (name, "rope_scaling"):
            if rope := config.get(table):
                require_value("partial_rotary_factor", rope.get("partial_rotary_factor"), _rotated_share(dials))
                without_share[table] = {key: value for key, value in rope.items() if key != "partial_rotary_factor"}
        return super().read(name, without_share, dials)

    def write(self, name: str, spec: ModelSpec) -> Table:
        """Return the embedding with the rotated share."""
        share = {"partial_rotary_factor": spec.rotary_width / spec.head_dim}
        return {
            key: value | share if isinstance(value, dict) else value for key, value in super().write(name, spec).items()
        }


def _rotated_share(dials: Table) -> float:
    share: float = dials["mixer.rope_dim"] / dials["head_dim"]
    return share


MISTRAL4 = replace(
    DEEPSEEK_V3,
    mtp=None,
    model_type="mistral4",
    architecture="Mistral4ForCausalLM",
    other_types=(),
    wrapper="mistral3",
    fields=LATENT_FIELDS
    | {name: field for name, field in DEEPSEEK_V3.fields.items() if name != "num_nextn_predict_layers"}
    | {
        "vocab_size": Read("vocab_size", 131072),
        "hidden_size": Read("hidden_size", 4096),
        "num_hidden_layers": Read("num_layers", 36),
        "num_attention_heads": Read("num_heads", 32),
        "q_lora_rank": Read("mixer.query_rank", 1024),
        "kv_lora_rank": Read("mixer.latent_rank", 256),
        "qk_nope_head_dim": WidthWithoutRotation("head_dim", 64),
        "head_dim": SameAs("head_dim"),
        "intermediate_size": Read("ffn_hidden_size", 12288),
        "max_position_embeddings": Read("max_seq_len", 1_048_576),
        "rope_parameters": PartialLatentRope(
            absent=DEFAULT_ROPE | {"rope_theta": 10_000.0, "factor": 128.0, "original_max_position_embeddings": 8192}
        ),
        "moe_intermediate_size": Read("moe.expert_ffn_size", 2048),
        "num_experts_per_tok": Read("moe.top_k", 4),
        "n_routed_experts": Read("moe.num_experts", 128, other_names=("num_local_experts",)),
        "routed_scaling_factor": Read("moe.routed_scale", 1.0),
        "n_group": Read("moe.num_groups", 1),
        "topk_group": Read("moe.top_groups", 1),
        "first_k_dense_replace": Read("moe.num_leading_dense_layers", 0),
        **dict.fromkeys(("topk_method", "scoring_func"), Field()),
    },
    constants=LATENT | {"moe.z_loss_coef": 0.0},
    unused=("moe.balance_loss_coef",),
    tensors=LLAMA.tensors
    | LATENT_TENSORS
    | SHARED_EXPERT_TENSORS
    | {
        "model.layers.{i}.mlp.gate.weight": "mlp.router.gate.weight",
        "model.layers.{i}.mlp.experts.gate_up_proj": Rows("mlp.experts.gate", "mlp.experts.up", stacked=True),
        "model.layers.{i}.mlp.experts.down_proj": Rows("mlp.experts.down", stacked=True),
    },
)

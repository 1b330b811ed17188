"""Laguna: heads with a gate by a softplus, of which each layer has a number of its own, and experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from phalanx.spec.errors import UserError
from phalanx.spec.families.family import Field, Fixed, Read, Table, require_supported, require_value
from phalanx.spec.families.forms import (
    FULL,
    MLP_TYPES,
    WINDOW,
    LayerKind,
    LayerLists,
    LayerTypes,
    RopeTables,
)
from phalanx.spec.families.llama import (
    EXPERT_TENSORS,
    LLAMA,
    QK_NORM_TENSORS,
    SIGMOID_ROUTER,
    query_heads,
    shared_expert_tensors,
)
from phalanx.spec.layers import layer_specs
from phalanx.spec.model import ModelSpec


@dataclass(frozen=True)
class RopesWithOuterFields(RopeTables):
    """Rotary embeddings of both types of layers. Published files repeat fields outside of the tables."""

    other_names: tuple[str, ...] = ("partial_rotary_factor",)

    def read(self, name: str, config: Table, dials: Table) -> Table:
        """Return the dials of both embeddings. Raises UserError for fields that contradict the table."""
        tables = dict(config.get(name) or self.absent)
        original = tables.pop("original_max_position_embeddings", None)
        full = tables.get("full_attention") or {}
        require_value(
            f"{name}.original_max_position_embeddings", original, full.get("original_max_position_embeddings")
        )
        read = super().read(name, {name: tables}, dials)
        require_value("partial_rotary_factor", config.get("partial_rotary_factor"), read["rope.fraction"])
        return read


@dataclass(frozen=True)
class HeadsOfLayers(LayerTypes):
    """List of the number of query heads of each layer."""

    kinds: Mapping[Any, LayerKind] = field(default_factory=dict)

    def kinds_of_layers(self, name: str, config: Table, dials: Table) -> list[LayerKind]:
        """Return the kind of each layer, without a name where it has as many heads as the model says."""
        heads = config.get(name) or [dials["num_heads"]] * dials["num_layers"]
        require_supported(f"{name} length", len(heads), (dials["num_layers"],))
        return [
            LayerKind("" if number == dials["num_heads"] else f"heads{number}", lambda _: False, {"num_heads": number})
            for number in heads
        ]

    def write(self, name: str, spec: ModelSpec) -> Table:
        """Return the list."""
        return {name: [layer.num_heads for layer in layer_specs(spec)]}


class DenseLayers(Field):
    """List of the layers with an MLP, which repeats that of the types of MLPs."""

    def read(self, name: str, config: Table, dials: Table) -> Table:
        """Return no dials. Raises UserError for other layers."""
        types = MLP_TYPES.words("mlp_layer_types", config, dials)
        dense = [layer for layer, mlp_type in enumerate(types) if mlp_type == "dense"]
        if config.get(name) is not None and config[name] != dense:
            raise UserError(f"config.json {name}", config[name], "contradicts mlp_layer_types", "set mlp_layer_types")
        return {}


class GateTypes(Field):
    """List of the types of gates."""

    def read(self, name: str, config: Table, dials: Table) -> Table:
        """Return no dials. Raises UserError for another gate than that of each head."""
        for gate in config.get(name) or ():
            require_supported(name, gate, ("per_head", "per-head"))
        return {}


ROPES = {
    "full_attention": {"rope_type": "default", "rope_theta": 500_000.0, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 1.0},
}

LAGUNA = replace(
    LLAMA,
    model_type="laguna",
    architecture="LagunaForCausalLM",
    fields=LLAMA.fields
    | {
        "vocab_size": Read("vocab_size", 100_352),
        "hidden_size": Read("hidden_size", 2048),
        "num_hidden_layers": Read("num_layers", 40),
        "num_attention_heads": Read("num_heads", 48),
        "num_key_value_heads": Read("num_kv_heads", 8, unset=query_heads),
        "head_dim": Read("head_dim", 128),
        "intermediate_size": Read("ffn_hidden_size", 8192),
        "max_position_embeddings": Read("max_seq_len", 131_072),
        "attention_bias": Fixed(False),
        "partial_rotary_factor": Field(),  # read with the tables
        "rope_parameters": RopesWithOuterFields(absent=ROPES),
        "sliding_window": Read("sliding_window", 512),
        "gating": Read("attention_gate", True, words={True: "head_softplus", "per-head": "head_softplus"}),
        "moe_intermediate_size": Read("moe.expert_ffn_size", 512),
        "shared_expert_intermediate_size": Read("moe.shared_ffn_size", 512),
        "num_experts": Read("moe.num_experts", 256),
        "num_experts_per_tok": Read("moe.top_k", 8),
        "router_aux_loss_coef": Read("moe.balance_loss_coef", 0.001),
        "moe_routed_scaling_factor": Read("moe.routed_scale", 1.0),
        "moe_apply_router_weight_on_input": Fixed(False),
        "moe_router_logit_softcapping": Fixed(0.0),
        "layer_types": LayerLists(
            {
                "layer_types": LayerTypes(
                    {"sliding_attention": WINDOW, "full_attention": FULL},
                    lambda config, dials: ["full_attention"] * dials["num_layers"],
                ),
                "mlp_layer_types": MLP_TYPES,
                "num_attention_heads_per_layer": HeadsOfLayers(),
            }
        ),
        # Fields of published files, which transformers does not read.
        "mlp_only_layers": DenseLayers(),
        "gating_types": GateTypes(),
        "norm_topk_prob": Fixed(True),
    },
    constants={
        "qk_norm": "head",
        "moe.num_shared_experts": 1,
        **SIGMOID_ROUTER,
        "moe.normalize_top_k": True,
    },
    unused=("moe.bias_update_rate",),
    tensors=LLAMA.tensors
    | QK_NORM_TENSORS
    | EXPERT_TENSORS
    | shared_expert_tensors("model.layers.{i}.mlp.shared_expert")
    | {
        "model.layers.{i}.self_attn.g_proj.weight": "attention.wg.weight",
        "model.layers.{i}.mlp.experts.e_score_correction_bias": "mlp.router.bias",
    },
)

"""Step 3.5 and 3.7, its text model: a gate of each head, more heads in layers with a window, limits of experts.

transformers has it inside step3p7 only, and so have exports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from phalanx.spec.errors import UserError
from phalanx.spec.families.family import (
    Field,
    Fixed,
    Read,
    Rows,
    Table,
    Written,
    any_value,
    require_supported,
    require_value,
)
from phalanx.spec.families.forms import FULL, WINDOW, LayerKind, LayerLists, LayerTypes, QueryScalar, RopeTables
from phalanx.spec.families.llama import LLAMA, QK_NORM_TENSORS, SIGMOID_ROUTER, query_heads, shared_expert_tensors
from phalanx.spec.layers import layer_specs
from phalanx.spec.model import ModelSpec

FULL_TYPE = "full_attention"


@dataclass(frozen=True)
class RopeOfLayers(RopeTables):
    """Rotary embeddings of both types of layers. Published files have lists of bases and of rotated shares."""

    other_names: tuple[str, ...] = ("rope_theta", "partial_rotary_factors", "rope_scaling", "yarn_only_types")

    def read(self, name: str, config: Table, dials: Table) -> Table:
        """Return the dials of both embeddings, each that of the first layer of its type. Scaling is of the full one."""
        types: Sequence[str] = config.get("layer_types") or [FULL_TYPE] * dials["num_layers"]
        types = types[: dials["num_layers"]]
        tables = config.get(name) or {}
        if not all(isinstance(tables.get(layer_type), dict) for layer_type in types):
            require_value("yarn_only_types", config.get("yarn_only_types"), [FULL_TYPE])
            tables = {}
            for field_name, key in (("rope_theta", "rope_theta"), ("partial_rotary_factors", "partial_rotary_factor")):
                for layer_type, value in zip(types, _of_layers(config, field_name, types), strict=False):
                    if value is not None:
                        require_value(field_name, value, tables.setdefault(layer_type, {}).setdefault(key, value))
            tables.setdefault(FULL_TYPE, {}).update(config.get("rope_scaling") or {})
        return super().read(name, {name: tables}, dials)


def _of_layers(config: Table, name: str, types: Sequence[str]) -> Sequence[object]:
    """Return the value of each layer, of a field that has one or a list of them."""
    value = config.get(name)
    return value if isinstance(value, list) else [value] * len(types)


class WindowHeads(Field):
    """Query heads of layers with a window, which published files have in a table of other settings."""

    dials = any_value("kinds.window.num_heads")
    other_names = ("attention_other_setting", "per_layer_config")

    def read(self, name: str, config: Table, dials: Table) -> Table:
        """Return the number. Raises UserError for other settings of some layers."""
        others = config.get("attention_other_setting") or {}
        require_value("attention_other_setting.attention_type", others.get("attention_type"), "sliding_attention")
        require_value(
            "attention_other_setting.num_attention_groups", others.get("num_attention_groups"), dials["num_kv_heads"]
        )
        for key in ("head_dim", "true_head_dim"):
            require_value(f"attention_other_setting.{key}", others.get(key), dials["head_dim"])
        heads = config.get(name) or others.get("num_attention_heads", dials["num_heads"])
        if config.get("per_layer_config") is not None:
            by_layer = {int(layer): table for layer, table in config["per_layer_config"].items()}
            types = config.get("layer_types") or ()
            layers = [layer for layer in range(dials["num_layers"]) if types and types[layer] != FULL_TYPE]
            require_value("per_layer_config", by_layer, {layer: {"num_attention_heads": heads} for layer in layers})
        return {"kinds.window.num_heads": heads}

    def write(self, name: str, spec: ModelSpec) -> Table:
        """Return the number, also for each of these layers."""
        windows = {index: layer for index, layer in enumerate(layer_specs(spec)) if layer.sliding_window}
        heads = next((layer.num_heads for layer in windows.values()), spec.num_heads)
        by_layer = {str(index): {"num_attention_heads": layer.num_heads} for index, layer in windows.items()}
        return {name: heads, "per_layer_config": by_layer}


@dataclass(frozen=True)
class LimitedMlps(LayerTypes):
    """List of the types of layers' MLPs, and those of the limits of routed experts, and of shared ones or an MLP."""

    kinds: Mapping[Any, LayerKind] = field(default_factory=dict)
    other_names: tuple[str, ...] = ("moe_layers_enum", "swiglu_limits", "swiglu_limits_shared")

    def kinds_of_layers(self, name: str, config: Table, dials: Table) -> list[LayerKind]:
        """Return the kind of each layer."""
        num_layers = dials["num_layers"]
        listed = config.get("moe_layers_enum")
        listed = listed.split(",") if isinstance(listed, str) else range(3, num_layers) if listed is None else listed
        sparse = {int(layer) for layer in listed if str(layer).strip()}
        types = config.get(name) or ["sparse" if layer in sparse else "dense" for layer in range(num_layers)]
        limits = [config.get(key) or [None] * num_layers for key in ("swiglu_limits", "swiglu_limits_shared")]
        if any(len(values) < num_layers for values in (types, *limits)):
            fix = f"have a value of each of the {num_layers} layers"
            raise UserError(f"config.json {name}", types, "or limits have too few layers", fix)
        return [_mlp_kind(*of_layer) for of_layer in zip(types[:num_layers], *limits, strict=False)]

    def write(self, name: str, spec: ModelSpec) -> Table:
        """Return all lists."""
        layers = layer_specs(spec)
        routed = [layer.silu_limit or 0.0 if layer.moe else 0.0 for layer in layers]
        shared = [(layer.shared_silu_limit if layer.moe else layer.silu_limit) or 0.0 for layer in layers]
        return {
            name: ["sparse" if layer.moe else "dense" for layer in layers],
            "swiglu_limits": routed if any(routed) else None,
            "swiglu_limits_shared": shared if any(shared) else None,
        }


def _mlp_kind(mlp_type: object, routed: float | None, shared: float | None) -> LayerKind:
    """Return the kind of layers with these limits, of which 0 is none."""
    require_supported("mlp_layer_types", mlp_type, ("sparse", "dense"))
    limits = {"silu_limit": routed, "shared_silu_limit": shared} if mlp_type == "sparse" else {"silu_limit": shared}
    dials: dict[str, object] = {dial: float(limit) for dial, limit in limits.items() if limit}
    # No two limits have one name: 7 is 7p0, and 1e-05 is 1em05.
    as_word = str.maketrans({".": "p", "-": "m", "+": None})
    words = [str(float(limit or 0)).translate(as_word) for limit in limits.values()] if dials else []
    name = "_".join((str(mlp_type), *words))
    return LayerKind(name, lambda _: False, dials if mlp_type == "sparse" else {"moe": False, **dials})


class RotatedLayers(Field):
    """List of whether each layer has positions: an empty one, or all have."""

    def read(self, name: str, config: Table, dials: Table) -> Table:
        """Return no dials. Raises UserError for a layer without positions."""
        for rotates in config.get(name) or ():
            require_supported(name, rotates, (True,))
        return {}


STEP3P5 = replace(
    LLAMA,
    model_type="step3p5",
    architecture="Step3p7ForConditionalGeneration",
    wrapper="step3p7",
    wrapper_ties_embeddings=False,
    exported_tower={
        "num_hidden_layers": 1,
        "hidden_size": 16,
        "mlp_ratio": 1.0,
        "num_attention_heads": 1,
        "image_size": 56,
    },
    fields=LLAMA.fields
    | {
        "vocab_size": Read("vocab_size", 128815),
        "num_hidden_layers": Read("num_layers", 45),
        "num_attention_heads": Read("num_heads", 64),
        "num_key_value_heads": Read("num_kv_heads", 8, unset=query_heads, other_names=("num_attention_groups",)),
        "head_dim": Read("head_dim", 128),
        "intermediate_size": Read("ffn_hidden_size", 11264),
        "max_position_embeddings": Read("max_seq_len", 128_000),
        "rms_norm_eps": Read("norm_eps", 1e-5),
        # transformers reads silu, whatever it is.
        "hidden_act": Written("silu"),
        "attention_bias": Fixed(False),
        "mlp_bias": Fixed(False),
        "sliding_window": Read("sliding_window", None),
        "query_pre_attn_scalar": QueryScalar(),
        "rope_parameters": RopeOfLayers(),
        "num_sliding_attention_heads": WindowHeads(),
        "moe_intermediate_size": Read("moe.expert_ffn_size", 1280),
        "n_routed_experts": Read("moe.num_experts", 288, other_names=("moe_num_experts", "num_local_experts")),
        "num_experts_per_tok": Read("moe.top_k", 8, other_names=("moe_top_k",)),
        "share_expert_dim": Read("moe.shared_ffn_size", 1280, other_names=("share_expert_dims",)),
        "moe_router_scaling_factor": Read("moe.routed_scale", 1.0),
        "layer_types": LayerLists(
            {
                "layer_types": LayerTypes(
                    {"sliding_attention": WINDOW, FULL_TYPE: FULL},
                    lambda config, dials: [FULL_TYPE] * dials["num_layers"],
                ),
                "mlp_layer_types": LimitedMlps(),
            }
        ),
        "pad_token_id": Written(1),
        "use_bidirectional_attention": Fixed(False),
        "gating": Fixed(True),
        **dict.fromkeys(
            ("num_nextn_predict_layers", "num_mtp_layers", "mtp_layer_types", "mtp_mlp_layer_types"), Field()
        ),
        # Fields of published files, which transformers does not read.
        **dict.fromkeys(
            ("use_moe", "use_qk_norm", "use_head_wise_attn_gate", "use_moe_router_bias", "norm_expert_weight"),
            Fixed(True),
        ),
        "zero_centered": Fixed(True),
        "moe_router_activation": Fixed("sigmoid"),
        "att_impl_type": Fixed("GQA"),
        "use_rope_layers": RotatedLayers(),
        **dict.fromkeys(("need_fp32_gate", "max_seq_len", "moe_layer_offset", "moe_every_n_layer"), Field()),
    },
    constants={
        "qk_norm": "head",
        "norm_offset": True,
        "attention_gate": "head",
        "moe.num_shared_experts": 1,
        **SIGMOID_ROUTER,
        "moe.normalize_top_k": True,
    },
    unused=("moe.balance_loss_coef", "moe.bias_update_rate"),
    tensors=LLAMA.tensors
    | QK_NORM_TENSORS
    | shared_expert_tensors("model.layers.{i}.share_expert")
    | {
        "model.layers.{i}.self_attn.g_proj.weight": "attention.wg.weight",
        "model.layers.{i}.moe.gate.weight": "mlp.router.gate.weight",
        "model.layers.{i}.moe.router_bias": "mlp.router.bias",
        **{
            f"model.layers.{{i}}.moe.{name}_proj.weight": Rows(f"mlp.experts.{name}", stacked=True)
            for name in ("gate", "up", "down")
        },
    },
    ignored_tensors=(*LLAMA.ignored_tensors, "model.layers.{L}.*"),
)

"""The text model of Gemma 4: full attention has wider heads, whose values may be the keys.

In E2B and E4B, layers have inputs of their own, and the last ones read the keys and values of earlier ones."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import ClassVar

from phalanx.spec.errors import UserError
from phalanx.spec.families.family import Field, Read, Rows, Table, any_value, require_supported, require_value
from phalanx.spec.families.forms import FULL, WINDOW, LayerTypes, OfKind, RopeByType, every_nth_full, rope_table
from phalanx.spec.families.gemma import GEMMA3
from phalanx.spec.families.llama import ATTENTION_BIAS
from phalanx.spec.layers import layer_specs
from phalanx.spec.model import ModelSpec

DEFAULT_ROPES: Table = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}


class LastLayerFull(LayerTypes):
    """List of the type of each layer, of which the last has full attention."""

    def read(self, name: str, config: Table, dials: Table) -> Table:
        """Return the kinds of layers."""
        types: Sequence[object] = config.get(name) or self.absent(config, dials)
        last = dials["num_layers"] - 1
        return super().read(name, {**config, name: [*types[:last], "full_attention"]}, dials)


@dataclass(frozen=True)
class RopeOfWideHeads(RopeByType):
    """Rotary embeddings of both types of layers, of which that of full attention may have a part of all frequencies."""

    tables: Table = field(default_factory=lambda: DEFAULT_ROPES)
    """Tables of both if config.json has none."""

    @property
    def dials(self) -> Mapping[str, Collection[object] | None]:
        """Dials of both embeddings."""
        return {**super().dials, **any_value("rope.fraction")}

    def read(self, name: str, config: Table, dials: Table) -> Table:
        """Return the dials of both embeddings."""
        tables = config.get(name) or self.tables
        full = dict(tables.get("full_attention") or {})
        fraction = full.pop("partial_rotary_factor", 1.0)
        if full.get("rope_type", "default") != "proportional" and fraction != 1:
            problem = "is supported with rope_type = proportional only"
            raise UserError(f"config.json {name}.full_attention.partial_rotary_factor", fraction, problem, "remove it")
        both = super().read(name, {**config, name: {**tables, "full_attention": full}}, dials)
        return both | {"rope.fraction": fraction}

    def write(self, name: str, spec: ModelSpec) -> Table:
        """Return both embeddings."""
        tables = super().write(name, spec)[name]
        fraction = {} if spec.rope.fraction == 1 else {"partial_rotary_factor": spec.rope.fraction}
        return {name: {**tables, "full_attention": rope_table(spec.rope) | fraction}}


class WideHeads(Field):
    """Width of heads and number of key/value heads of full attention, in one table for each such layer."""

    dials = any_value("kinds.full.head_dim", "kinds.full.num_kv_heads")
    other_names = ("global_head_dim", "num_global_key_value_heads")

    def read(self, name: str, config: Table, dials: Table) -> Table:
        """Return the dials, of which published files have two fields. Raises UserError if layers differ."""
        full = {"head_dim": config.get("global_head_dim", 512)}
        if config.get("num_global_key_value_heads") is not None and config.get("attention_k_eq_v"):
            full["num_key_value_heads"] = config["num_global_key_value_heads"]
        tables = config.get(name)
        if tables is not None:
            types = config.get("layer_types") or every_nth_full(6)(config, dials)
            layers = [layer for layer in range(dials["num_layers"]) if types[layer] == "full_attention"]
            full = next(iter(tables.values()), {})
            by_layer = {int(layer): table for layer, table in tables.items()}
            if by_layer != dict.fromkeys({*layers, dials["num_layers"] - 1}, full):
                raise UserError(f"config.json {name}", tables, "differs between layers of one type", "make them equal")
        full = {"num_key_value_heads": dials["num_kv_heads"], **full}
        words = {"head_dim": "head_dim", "num_key_value_heads": "num_kv_heads"}
        for word in full:
            require_supported(f"{name} field", word, words)
        return {f"kinds.full.{words[word]}": value for word, value in full.items()}

    def write(self, name: str, spec: ModelSpec) -> Table:
        """Return a table for each layer with full attention."""
        layers = {layer: each for layer, each in enumerate(layer_specs(spec)) if each.sliding_window is None}
        return {
            name: {
                str(layer): {"head_dim": each.head_dim, "num_key_value_heads": each.num_kv_heads}
                for layer, each in layers.items()
            }
        }


class TextMask(Field):
    """Attention to later tokens, which image tokens may have."""

    def read(self, name: str, config: Table, dials: Table) -> Table:
        """Return no dials. Raises UserError if all tokens have it."""
        require_supported(name, config.get(name), (None, "vision"))
        return {}


class InputsOfLayers(Field):
    """Width of the inputs of layers, of which the table has as many rows as the embedding; 0 without them."""

    dials = any_value("per_layer_input_size")
    other_names = ("vocab_size_per_layer_input",)

    def read(self, name: str, config: Table, dials: Table) -> Table:
        """Return the width. Raises UserError for another number of rows."""
        size = config.get(name, 256)
        if not size:
            return {}
        (rows,) = self.other_names
        require_value(rows, config.get(rows, 262144), dials["vocab_size"])
        return {"per_layer_input_size": size}

    def write(self, name: str, spec: ModelSpec) -> Table:
        """Return the width, and the number of rows if there is a table."""
        rows = dict.fromkeys(self.other_names, spec.vocab_size) if spec.per_layer_input_size else {}
        return {name: spec.per_layer_input_size or 0, **rows}


class SharedKeys(Field):
    """Number of the last layers that read the keys and values of others, whose MLP may be twice as wide."""

    dials = any_value("num_shared_kv_layers", "shared_kv_ffn_size")
    other_names = ("use_double_wide_mlp",)

    def read(self, name: str, config: Table, dials: Table) -> Table:
        """Return the number of layers, and the inner width of their MLP if it is another one."""
        count = config.get(name, 0)
        is_wide = count and config.get("use_double_wide_mlp")
        return {"num_shared_kv_layers": count} | (
            {"shared_kv_ffn_size": 2 * dials["ffn_hidden_size"]} if is_wide else {}
        )

    def write(self, name: str, spec: ModelSpec) -> Table:
        """Return the number, and whether the width is twice that of the others. Raises UserError for a third one."""
        factor = (spec.shared_kv_ffn_size or spec.ffn_hidden_size) / spec.ffn_hidden_size
        if factor not in (1, 2):
            problem = f"is neither model.ffn_hidden_size ({spec.ffn_hidden_size}) nor twice that, as in Gemma 4"
            raise UserError("model.shared_kv_ffn_size", spec.shared_kv_ffn_size, problem, "change it")
        wide = {"use_double_wide_mlp": factor == 2} if spec.num_shared_kv_layers else {}
        return {name: spec.num_shared_kv_layers, **wide}


class OptionalExperts(Field):
    """Experts in each layer, next to its MLP, if the model has them."""

    sizes: ClassVar[Table] = {
        "num_experts": "moe.num_experts",
        "top_k_experts": "moe.top_k",
        "moe_intermediate_size": "moe.expert_ffn_size",
    }
    form: ClassVar[Table] = {
        "moe.dense_branch": True,
        "moe.router_norm": True,
        "moe.expert_scales": True,
        "moe.z_loss_coef": 0.0,
    }
    other_names = tuple(sizes)

    @property
    def dials(self) -> Mapping[str, Collection[object] | None]:
        """Dials of the experts, of which some have one value."""
        return {**any_value(*self.sizes.values()), **{dial: (value,) for dial, value in self.form.items()}}

    def read(self, name: str, config: Table, dials: Table) -> Table:
        """Return the dials of the experts."""
        if not config.get(name):
            return {}
        return {dial: config[field] for field, dial in self.sizes.items()} | self.form

    def write(self, name: str, spec: ModelSpec) -> Table:
        """Return whether there are experts, and their sizes."""
        sizes = {field: attrgetter(dial)(spec) for field, dial in self.sizes.items()} if spec.moe else {}
        return {name: spec.moe is not None, **sizes}


GEMMA4 = replace(
    GEMMA3,
    model_type="gemma4_text",
    architecture="Gemma4ForCausalLM",
    wrapper="gemma4",
    fields={name: field for name, field in GEMMA3.fields.items() if name not in ("query_pre_attn_scalar", "hidden_act")}
    | {
        "vocab_size": Read("vocab_size", 262144),
        "num_hidden_layers": Read("num_layers", 30),
        "attention_bias": ATTENTION_BIAS,
        "sliding_window": Read("sliding_window", 512),
        "layer_types": LastLayerFull({"sliding_attention": WINDOW, "full_attention": FULL}, every_nth_full(6)),
        "rope_parameters": RopeOfWideHeads(),
        "per_layer_config": WideHeads(),
        "attention_k_eq_v": OfKind(FULL, Read("values_from_keys", False)),
        "attn_logit_softcapping": Field(),
        "use_bidirectional_attention": TextMask(),
        "hidden_size_per_layer_input": InputsOfLayers(),
        "num_kv_shared_layers": SharedKeys(),
        "enable_moe_block": OptionalExperts(),
    },
    constants={
        "qk_norm": "head",
        "norm_position": "both",
        "value_norm": True,
        "attention_scale": 1.0,
        "layer_scalars": True,
    },
    has_optional_experts=True,
    unused=("moe.balance_loss_coef",),
    tensors=GEMMA3.tensors
    | {
        "model.layers.{i}.layer_scalar": "layer_scalar",
        "model.embed_tokens_per_layer.weight": "per_layer_inputs.embedding.weight",
        "model.per_layer_model_projection.weight": "per_layer_inputs.projection.weight",
        "model.per_layer_projection_norm.weight": "per_layer_inputs.norm.weight",
        "model.layers.{i}.per_layer_input_gate.weight": "per_layer.gate.weight",
        "model.layers.{i}.per_layer_projection.weight": "per_layer.down.weight",
        "model.layers.{i}.post_per_layer_input_norm.weight": "per_layer_after.weight",
    },
    # The MLP is then a branch of its own, and some norms are around both.
    expert_tensors={
        "model.layers.{i}.pre_feedforward_layernorm.weight": "dense_norm.weight",
        **{f"model.layers.{{i}}.mlp.{name}_proj.weight": f"dense.{name}.weight" for name in ("gate", "up", "down")},
        "model.layers.{i}.post_feedforward_layernorm_1.weight": "dense_after.weight",
        "model.layers.{i}.pre_feedforward_layernorm_2.weight": "mlp_norm.weight",
        "model.layers.{i}.router.scale": "mlp.router.norm.weight",
        "model.layers.{i}.router.proj.weight": "mlp.router.gate.weight",
        "model.layers.{i}.router.per_expert_scale": "mlp.router.expert_scale",
        "model.layers.{i}.experts.gate_up_proj": Rows("mlp.experts.gate", "mlp.experts.up", stacked=True),
        "model.layers.{i}.experts.down_proj": Rows("mlp.experts.down", stacked=True),
        "model.layers.{i}.post_feedforward_layernorm_2.weight": "mlp_after.weight",
        "model.layers.{i}.post_feedforward_layernorm.weight": "sum_after.weight",
    },
)

"""Fields of config.json that are not the value of one dial: rotary embedding, windows, kinds of layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from operator import attrgetter

from phalanx.spec.errors import UserError
from phalanx.spec.families.family import Field, Read, Table, any_value, first_word, require_supported, require_value
from phalanx.spec.layer_pattern import write_layers
from phalanx.spec.layers import layer_specs
from phalanx.spec.model import ModelSpec

SCALINGS = {"default": "none", "linear": "linear", "llama3": "llama3", "yarn": "yarn"}
SCALING_FIELDS = {"llama3": ("low_freq_factor", "high_freq_factor"), "yarn": ("beta_fast", "beta_slow")}
"""Fields of the rope table that are dials of the same name, by the scaling that uses them."""
ROPE_FIELDS = frozenset(
    """
    rope_type type rope_theta factor original_max_position_embeddings low_freq_factor high_freq_factor
    beta_fast beta_slow attention_factor truncate mscale mscale_all_dim partial_rotary_factor finetuned
    """.split()  # noqa: SIM905
)
"""Fields of rope_parameters and rope_scaling that are supported or without effect."""


@dataclass(frozen=True)
class Rope(Field):
    """Rotary embedding: rope_parameters of transformers 5; rope_theta and rope_scaling of earlier versions."""

    theta: float = 10_000.0
    """Base of the frequencies if config.json has none."""
    other_names = ("rope_theta", "rope_scaling", "original_max_position_embeddings")
    dials = any_value("rope.theta", "rope.factor", "rope.original_context") | {
        **any_value("rope.low_freq_factor", "rope.high_freq_factor", "rope.beta_fast", "rope.beta_slow"),
        "rope.scaling": SCALINGS.values(),
    }

    def read(self, name: str, config: Table, dials: Table) -> Table:
        """Return the dials of the embedding; rope_scaling has precedence over rope_parameters."""
        rope = config.get("rope_scaling") or config.get(name) or {}
        rope_type = rope.get("rope_type", rope.get("type", "default"))
        require_supported("rope_type", rope_type, SCALINGS)
        require_value("partial_rotary_factor", rope.get("partial_rotary_factor"), 1.0)
        theta = rope.get("rope_theta") or config.get("rope_theta", self.theta)
        scaling = {"rope.theta": float(theta), "rope.scaling": SCALINGS[rope_type]}
        if rope_type == "default":
            return scaling
        factor = rope.get("factor")
        if rope_type in SCALING_FIELDS:
            # Some models store it next to the table, and transformers reads that value first.
            top_level, nested = (source.get("original_max_position_embeddings") for source in (config, rope))
            original_context = top_level or nested or dials["max_seq_len"]
            scaling["rope.original_context"] = original_context
            if factor is None and rope_type == "yarn":
                factor = dials["max_seq_len"] / original_context
        if factor is None:
            fix = "use the config.json of a complete model"
            raise UserError("config.json rope_parameters.factor", None, "is missing", fix=fix)
        scaling["rope.factor"] = float(factor)
        if rope_type == "yarn":
            require_value("truncate", rope.get("truncate"), True)
            require_value("attention_factor", rope.get("attention_factor"), 0.1 * math.log(float(factor)) + 1.0)
            require_value("mscale_all_dim", rope.get("mscale_all_dim"), 0)
        fields = (field for fields in SCALING_FIELDS.values() for field in fields)
        return scaling | {f"rope.{field}": float(rope[field]) for field in fields if rope.get(field) is not None}

    def write(self, name: str, spec: ModelSpec) -> Table:
        """Return the embedding in the fields of all versions."""
        rope = spec.rope
        table: Table = {"rope_type": first_word(SCALINGS, rope.scaling), "rope_theta": rope.theta}
        if rope.scaling != "none":
            table["factor"] = rope.factor
        if rope.scaling in SCALING_FIELDS:
            table["original_max_position_embeddings"] = rope.original_context
            table |= {field: getattr(rope, field) for field in SCALING_FIELDS[rope.scaling]}
        return {"rope_theta": rope.theta, "rope_scaling": None if rope.scaling == "none" else table, name: table}


class SwitchedWindow(Field):
    """Window that use_sliding_window switches on, in all layers."""

    dials = any_value("sliding_window")
    other_names: tuple[str, ...] = ("sliding_window",)

    def read(self, name: str, config: Table, dials: Table) -> Table:
        """Return the window, if it is on."""
        window = config.get("sliding_window", 4096) if config.get(name) else None
        return {} if window is None else {"sliding_window": window}

    def write(self, name: str, spec: ModelSpec) -> Table:
        """Return the switch and the window, if there is one."""
        return {} if spec.sliding_window is None else {name: True, "sliding_window": spec.sliding_window}


class LayerWindow(SwitchedWindow):
    """Window that use_sliding_window switches on, in the layers of layer_types, or from max_window_layers on."""

    dials = any_value("sliding_window", "full_attention_layers")
    other_names = ("sliding_window", "max_window_layers", "layer_types")

    def read(self, name: str, config: Table, dials: Table) -> Table:
        """Return the window and the layers without it, if it is on in some layers."""
        window = super().read(name, config, dials)
        layer_types = config.get("layer_types")
        if layer_types is None:
            full_layers = list(range(min(config.get("max_window_layers", 28), dials["num_layers"])))
        else:
            for layer_type in layer_types:
                require_supported("layer_types", layer_type, ["full_attention", *["sliding_attention"] * bool(window)])
            full_layers = [layer for layer, layer_type in enumerate(layer_types) if layer_type == "full_attention"]
        if not window or len(full_layers) == dials["num_layers"]:
            return {}
        return window | ({"full_attention_layers": full_layers} if full_layers else {})

    def write(self, name: str, spec: ModelSpec) -> Table:
        """Return the switch, the window and the layers that have it, if there is one."""
        table = super().write(name, spec)
        if table:
            table["max_window_layers"] = 0
        if spec.full_attention_layers:
            is_full = (layer.sliding_window is None for layer in layer_specs(spec))
            table["layer_types"] = ["full_attention" if full else "sliding_attention" for full in is_full]
        return table


class LeadingLayers(Field):
    """List of the layers with a dense MLP: the leading ones."""

    dials = any_value("moe.num_leading_dense_layers")

    def read(self, name: str, config: Table, dials: Table) -> Table:
        """Return the number of layers. Raises UserError if the list has others than the leading ones."""
        num_layers = len(config.get(name) or [])
        require_value(name, config.get(name), list(range(num_layers)))
        return {"moe.num_leading_dense_layers": num_layers}

    def write(self, name: str, spec: ModelSpec) -> Table:
        """Return the list."""
        return {name: list(range(attrgetter("moe.num_leading_dense_layers")(spec)))}


@dataclass(frozen=True)
class LayerKind:
    """A kind of layers in a family."""

    name: str
    """Name in `ModelSpec.layers`."""
    includes: Callable[[ModelSpec], bool]
    """Function of a layer (`spec.layers`): whether it is of this kind."""
    dials: Mapping[str, object] = field(default_factory=dict)
    """Fixed dials of the kind; a kind without any is as the model says."""


@dataclass(frozen=True)
class LayerTypes(Field):
    """List of the type of each layer."""

    kinds: Mapping[str, LayerKind]
    """Kinds by the words of config.json."""
    absent: Callable[[Table, Table], list[str]]
    """Function of config.json and the dials so far that returns the list where it is absent."""
    other_names: tuple[str, ...] = ()
    dials = any_value("layers", "kinds")

    def read(self, name: str, config: Table, dials: Table) -> Table:
        """Return the kinds of layers, if some are not as the model says."""
        words = config.get(name) or self.absent(config, dials)
        for word in words:
            require_supported(name, word, self.kinds)
        kinds = [self.kinds[word] for word in words]
        if not any(kind.dials for kind in kinds):
            return {}
        fixed = {f"kinds.{kind.name}.{dial}": value for kind in kinds for dial, value in kind.dials.items()}
        return {"layers": write_layers([kind.name for kind in kinds]), **fixed}

    def write(self, name: str, spec: ModelSpec) -> Table:
        """Return the list."""
        words = (next(word for word, kind in self.kinds.items() if kind.includes(layer)) for layer in layer_specs(spec))
        return {name: list(words)}


@dataclass(frozen=True)
class OfKind(Field):
    """A field with the value of a dial of one kind of layers."""

    kind: LayerKind
    field: Read
    """The field as of a layer."""

    @property
    def dials(self) -> Mapping[str, Collection[object] | None]:
        """Dial of the kind."""
        return {f"kinds.{self.kind.name}.{dial}": values for dial, values in self.field.dials.items()}

    def read(self, name: str, config: Table, dials: Table) -> Table:
        """Return the value of the dial."""
        return {f"kinds.{self.kind.name}.{dial}": value for dial, value in self.field.read(name, config, dials).items()}

    def write(self, name: str, spec: ModelSpec) -> Table:
        """Return the field with the value of the first layer of the kind."""
        layer = next(filter(self.kind.includes, layer_specs(spec)), None)
        return self.field.write(name, layer) if layer else {name: self.field.default}

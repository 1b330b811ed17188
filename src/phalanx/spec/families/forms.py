"""Fields of config.json that are not the value of one dial: rotary embedding, windows, kinds of layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

from phalanx.spec.errors import UserError
from phalanx.spec.families.family import Field, Read, Table, any_value, first_word, require_supported, require_value
from phalanx.spec.layer_pattern import write_layers
from phalanx.spec.layers import layer_specs
from phalanx.spec.model import ModelSpec, RopeSpec, yarn_mscale

SCALINGS = {"default": "none", **{name: name for name in ("linear", "llama3", "yarn", "proportional")}}
SCALING_FIELDS = {"llama3": ("low_freq_factor", "high_freq_factor"), "yarn": ("beta_fast", "beta_slow", "truncate")}
"""Fields of the rope table that are dials of the same name, by the scaling that uses them."""
ROPE_FIELDS = frozenset(
    """
    rope_type type rope_theta factor original_max_position_embeddings low_freq_factor high_freq_factor
    beta_fast beta_slow attention_factor truncate mscale mscale_all_dim partial_rotary_factor finetuned
    """.split()  # noqa: SIM905
)
"""Fields of rope_parameters and rope_scaling that are supported or without effect."""


def score_factor(spec: ModelSpec) -> float:
    """Return the factor of attention's scores besides 1 / sqrt(head_dim), with which the product is the same number."""
    scale = spec.attention_scale or spec.head_dim**-0.5
    factor = scale / spec.head_dim**-0.5
    near = (round(factor, 12), factor, math.nextafter(factor, 0), math.nextafter(factor, math.inf))
    return next((each for each in near if spec.head_dim**-0.5 * each == scale), factor)


ROPE_DIALS = any_value("theta", "factor", "original_context", "low_freq_factor", "high_freq_factor") | {
    **any_value("beta_fast", "beta_slow", "attention_factor", "truncate"),
    "scaling": SCALINGS.values(),
}
"""Dials of a rotary embedding, of which a field can express these values."""


@dataclass(frozen=True)
class Rope(Field):
    """Rotary embedding: rope_parameters of transformers 5; rope_theta and rope_scaling of earlier versions."""

    theta: float = 10_000.0
    """Base of the frequencies if config.json has none."""
    has_fraction: bool = False
    """True if a model of the family may rotate a part of the channels."""
    fraction: float = 1.0
    """Part that is rotated if config.json has none."""
    table_fields = ROPE_FIELDS
    """Fields of the tables that are supported or without effect."""
    absent: Table = field(default_factory=dict)
    """Table if config.json has none."""
    other_names: tuple[str, ...] = (
        *("rope_theta", "rope_scaling", "original_max_position_embeddings", "partial_rotary_factor", "rotary_dim"),
    )

    @property
    def dials(self) -> Mapping[str, Collection[object] | None]:
        """Dials of `model.rope`."""
        fraction = any_value("rope.fraction") if self.has_fraction else {}
        return {f"rope.{dial}": values for dial, values in ROPE_DIALS.items()} | fraction

    def read(self, name: str, config: Table, dials: Table) -> Table:
        """Return the dials of the embedding; rope_scaling has precedence over rope_parameters."""
        rope = config.get("rope_scaling") or config.get(name) or self.absent
        fraction = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor")
        if fraction is None and self.has_fraction and config.get("rotary_dim"):
            fraction = config["rotary_dim"] / dials["head_dim"]
        fraction = fraction or self.fraction
        if not self.has_fraction:
            require_value("partial_rotary_factor", fraction, 1.0)
        return self.read_table(rope, config, dials) | ({"rope.fraction": fraction} if self.has_fraction else {})

    def read_table(self, rope: Table, config: Table, dials: Table) -> Table:
        """Return the dials of a table of an embedding."""
        rope_type: str = rope.get("rope_type") or rope.get("type") or "default"
        require_supported("rope_type", rope_type, SCALINGS)
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
        if factor is None and rope_type == "proportional":
            factor = 1.0
        if factor is None:
            fix = "use the config.json of a complete model"
            raise UserError("config.json rope_parameters.factor", None, "is missing", fix=fix)
        scaling["rope.factor"] = float(factor)
        if rope_type == "yarn":
            scaling["rope.attention_factor"] = attention_factor(rope, float(factor))
        given = {field: rope[field] for field in SCALING_FIELDS.get(rope_type, ()) if rope.get(field) is not None}
        return scaling | {
            f"rope.{field}": value if field == "truncate" else float(value) for field, value in given.items()
        }

    def write(self, name: str, spec: ModelSpec) -> Table:
        """Return the embedding in the fields of all versions."""
        table = rope_table(spec.rope)
        fraction = {"partial_rotary_factor": spec.rope.fraction} if self.has_fraction else {}
        scaling = {} if spec.rope.scaling == "none" else table | fraction
        return {"rope_theta": spec.rope.theta, "rope_scaling": scaling or None, name: table | fraction, **fraction}


def attention_factor(rope: Table, factor: float) -> float | None:
    """Return YaRN's factor of queries and keys; None if it is the default."""
    default = yarn_mscale(factor)
    scale = rope.get("mscale")
    scale_all = rope.get("mscale_all_dim")
    if scale and scale_all:
        default = yarn_mscale(factor, scale) / yarn_mscale(factor, scale_all)
    value = rope.get("attention_factor")
    value = default if value is None else float(value)
    return None if value == yarn_mscale(factor) else value


def rope_table(rope: RopeSpec) -> Table:
    """Return the table of an embedding, as in rope_parameters."""
    table: Table = {"rope_type": first_word(SCALINGS, rope.scaling), "rope_theta": rope.theta}
    if rope.scaling != "none":
        table["factor"] = rope.factor
    if rope.scaling in SCALING_FIELDS:
        table["original_max_position_embeddings"] = rope.original_context
        table |= {field: getattr(rope, field) for field in SCALING_FIELDS[rope.scaling]}
    if rope.scaling == "yarn" and rope.attention_factor is not None:
        table["attention_factor"] = rope.attention_factor
    return table


@dataclass(frozen=True)
class RopeByType(Rope):
    """Rotary embeddings of two types of layers: full attention, which is the model's, and sliding windows."""

    window_theta: float = 10_000.0
    """Base of the frequencies in layers with a window, if config.json has none."""
    window_field: str = ""
    """Field with this base in older versions."""
    other_names: tuple[str, ...] = (*Rope.other_names, "rope_local_base_freq")

    @property
    def dials(self) -> Mapping[str, Collection[object] | None]:
        """Dials of `model.rope`, and of that of layers with a window."""
        of_model = super().dials
        return {**of_model, **{f"kinds.window.{dial}": values for dial, values in of_model.items()}}

    def read(self, name: str, config: Table, dials: Table) -> Table:
        """Return the dials of both embeddings. Top-level fields of older versions are those of full attention."""
        tables = config.get(name) or {}
        for key in tables:
            require_supported(name, key, ("full_attention", "sliding_attention"))
        full = (tables.get("full_attention") or {}) | (config.get("rope_scaling") or {})
        window = tables.get("sliding_attention") or {}
        local_theta = config.get(self.window_field, self.window_theta)
        of_windows = self._read_typed({"rope_theta": local_theta} | window, {}, dials)
        of_model = self._read_typed(full, config, dials)
        return of_model | {f"kinds.window.{dial}": value for dial, value in of_windows.items()}

    def _read_typed(self, rope: Table, config: Table, dials: Table) -> Table:
        """Return the dials of the table of a type of layers."""
        # Scaled frequencies have another default than those of the family.
        is_scaled = rope.get("rope_type", "default") != "default"
        fraction = rope.get("partial_rotary_factor", 1.0 if is_scaled else self.fraction)
        if not self.has_fraction:
            require_value("partial_rotary_factor", fraction, 1.0)
        # transformers does not read `truncate` in these.
        rope = {key: value for key, value in rope.items() if key != "truncate"}
        return self.read_table(rope, config, dials) | ({"rope.fraction": fraction} if self.has_fraction else {})

    def _write_typed(self, rope: RopeSpec) -> Table:
        """Return the table of a type of layers."""
        return rope_table(rope) | ({"partial_rotary_factor": rope.fraction} if self.has_fraction else {})

    def write(self, name: str, spec: ModelSpec) -> Table:
        """Return both embeddings in the fields of all versions."""
        full = self._write_typed(spec.rope)
        window = next((layer.rope for layer in layer_specs(spec) if layer.sliding_window), spec.rope)
        return {
            "rope_theta": spec.rope.theta,
            **({self.window_field: window.theta} if self.window_field else {}),
            "rope_scaling": None if spec.rope.scaling == "none" else full,
            name: {"full_attention": full, "sliding_attention": self._write_typed(window)},
        }


@dataclass(frozen=True)
class RopeTables(RopeByType):
    """Rotary embeddings of two types of layers, with a table of each, but no fields of older versions."""

    has_fraction: bool = True
    other_names: tuple[str, ...] = ()

    def read(self, name: str, config: Table, dials: Table) -> Table:
        """Return the dials of both embeddings."""
        return super().read(name, {name: config.get(name) or self.absent}, dials)

    def write(self, name: str, spec: ModelSpec) -> Table:
        """Return the tables of both embeddings."""
        return {name: super().write(name, spec)[name]}


@dataclass(frozen=True)
class Repeated(Field):
    """A field of published files that repeats a dial, or several times its value; export leaves it out."""

    dial: str
    times: int = 1

    def read(self, name: str, config: Table, dials: Table) -> Table:
        """Return no dials. Raises UserError for another value."""
        require_value(name, config.get(name), self.times * dials[self.dial])
        return {}


@dataclass(frozen=True)
class QueryScalar(Field):
    """Attention's scale as the number whose inverse square root it is."""

    default: int | None = None
    """Number if config.json has none; None: the width of a head."""
    dials = any_value("attention_scale")

    def read(self, name: str, config: Table, dials: Table) -> Table:
        """Return the scale, unless it is the default, 1 / sqrt(head_dim)."""
        scalar = config.get(name, self.default) or dials["head_dim"]
        return {} if scalar == dials["head_dim"] else {"attention_scale": scalar**-0.5}

    def write(self, name: str, spec: ModelSpec) -> Table:
        """Return the number."""
        scale = spec.attention_scale
        return {name: spec.head_dim if scale is None else round(scale**-2)}


@dataclass(frozen=True)
class ScaledWidth(Read):
    """Width of a model whose embedding is scaled by the square root of it."""

    @property
    def dials(self) -> Mapping[str, Collection[object] | None]:
        """Dials of the width and of the scale."""
        return any_value(self.dial, "embedding_scale")

    def read(self, name: str, config: Table, dials: Table) -> Table:
        """Return the width and the scale."""
        width = super().read(name, config, dials)
        return {**width, "embedding_scale": math.sqrt(width[self.dial])}


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
    other_names: tuple[str, ...] = ("sliding_window", "max_window_layers", "layer_types")

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


@dataclass(frozen=True)
class EqualLayers(Field):
    """List of the types of layers, of which all have one."""

    layer_type: str = "full_attention"

    def read(self, name: str, config: Table, dials: Table) -> Table:
        """Return no dials. Raises UserError for another type."""
        for layer_type in config.get(name) or ():
            require_supported(name, layer_type, [self.layer_type])
        return {}


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
class LayersWithExperts(Field):
    """List of the types of layers' MLPs, of which the leading ones may be dense."""

    default: int = 1
    """Dense layers if config.json has no list."""
    other_names: tuple[str, ...] = ()
    """Field that has their number in files without a list."""
    dials = any_value("moe.num_leading_dense_layers")

    def read(self, name: str, config: Table, dials: Table) -> Table:
        """Return the number of dense layers. Raises UserError for a dense layer after one with experts."""
        num_layers = dials["num_layers"]
        types = config.get(name)
        counts = (config[other] for other in self.other_names if config.get(other) is not None)
        num_dense = min(next(counts, self.default), num_layers) if types is None else types.count("dense")
        if types is not None and types != leading_dense(num_dense, num_layers):
            fix = "use a model whose dense layers are the first ones"
            raise UserError(f"config.json {name}", types, "is not supported", fix)
        return {"moe.num_leading_dense_layers": num_dense}

    def write(self, name: str, spec: ModelSpec) -> Table:
        """Return the list."""
        assert spec.moe
        return {name: leading_dense(spec.moe.num_leading_dense_layers, spec.num_layers)}


def leading_dense(num_dense: int, num_layers: int) -> list[str]:
    """Return the types of the MLPs of layers, of which the leading ones are dense."""
    return ["dense" if layer < num_dense else "sparse" for layer in range(num_layers)]


@dataclass(frozen=True)
class LayerKind:
    """A kind of layers in a family."""

    name: str
    """Name in `ModelSpec.layers`."""
    includes: Callable[[ModelSpec], bool]
    """Function of a layer (`spec.layers`): whether it is of this kind."""
    dials: Mapping[str, object] = field(default_factory=dict)
    """Fixed dials of the kind; a kind without any is as the model says."""


WINDOW = LayerKind("window", lambda layer: layer.sliding_window is not None)
"""Layers with the window that the model has."""
FULL = LayerKind("full", lambda layer: layer.sliding_window is None, {"sliding_window": False})
ROTARY = LayerKind("rotary", lambda layer: layer.position_embedding == "rope")
NOPE = LayerKind("nope", lambda layer: layer.position_embedding == "none", {"position_embedding": "none"})
SPARSE = LayerKind("sparse", lambda layer: layer.moe is not None)
DENSE = LayerKind("dense", lambda layer: layer.moe is None, {"moe": False})
FULL_NOPE = replace(FULL, dials={**FULL.dials, "position_embedding": "none"})
"""Layers with neither a window nor positions."""


@dataclass(frozen=True)
class LayerTypes(Field):
    """List of the type of each layer."""

    kinds: Mapping[Any, LayerKind]
    """Kinds by the words of config.json."""
    absent: Callable[[Table, Table], Sequence[object]] = lambda config, dials: ()
    """Function of config.json and the dials so far that returns the list where it is absent."""
    other_names: tuple[str, ...] = ()
    dials = any_value("layers", "kinds")

    def words(self, name: str, config: Table, dials: Table) -> Sequence[object]:
        """Return the list, or that of a model without one."""
        return config.get(name) or self.absent(config, dials)

    def kinds_of_layers(self, name: str, config: Table, dials: Table) -> list[LayerKind]:
        """Return the kind of each layer. Raises UserError for a word without one."""
        words = self.words(name, config, dials)
        if len(words) < dials["num_layers"]:
            fix = f"name the type of each of the {dials['num_layers']} layers"
            raise UserError(f"config.json {name}", list(words), "has too few layers", fix)
        words = words[: dials["num_layers"]]
        for word in words:
            require_supported(name, word, self.kinds)
        return [self.kinds[word] for word in words]

    def read(self, name: str, config: Table, dials: Table) -> Table:
        """Return the kinds of layers, if some are not as the model says."""
        kinds = self.kinds_of_layers(name, config, dials)
        has_own_dials = any(dial.startswith(f"kinds.{kind.name}.") for kind in kinds for dial in dials)
        if not has_own_dials and not any(kind.dials for kind in kinds):
            return {}
        fixed = {f"kinds.{kind.name}.{dial}": value for kind in kinds for dial, value in kind.dials.items()}
        return {"layers": write_layers([kind.name for kind in kinds]), **fixed}

    def write(self, name: str, spec: ModelSpec) -> Table:
        """Return the list."""
        words = (next(word for word, kind in self.kinds.items() if kind.includes(layer)) for layer in layer_specs(spec))
        return {name: list(words)}


MLP_TYPES = LayerTypes({"sparse": SPARSE, "dense": DENSE}, lambda config, dials: leading_dense(1, dials["num_layers"]))
"""List of the types of layers' MLPs, of which the first is dense in a model without one."""


@dataclass(frozen=True)
class LeadingDense(LayerTypes):
    """Number of leading layers with an MLP in place of experts."""

    kinds: Mapping[Any, LayerKind] = field(default_factory=lambda: {"sparse": SPARSE, "dense": DENSE})
    default: int = 1

    def words(self, name: str, config: Table, dials: Table) -> Sequence[object]:
        """Return the type of each layer."""
        return leading_dense(config.get(name, self.default) or 0, dials["num_layers"])

    def write(self, name: str, spec: ModelSpec) -> Table:
        """Return the number of layers without experts."""
        return {name: sum(layer.moe is None for layer in layer_specs(spec))}


@dataclass(frozen=True)
class LayerLists(Field):
    """Several lists of types of layers, such as of attention and of MLPs: a kind of layers is a type of each.

    It has their dials, and those of fields before this one (`OfKind`), and their names, of which some may be empty."""

    lists: Mapping[str, LayerTypes]
    """Lists by the name of their field."""
    dials = any_value("layers", "kinds")

    @property
    def other_names(self) -> tuple[str, ...]:  # type: ignore[override]
        """Fields of the lists."""
        return tuple(name for field, types in self.lists.items() for name in (field, *types.other_names))

    def read(self, name: str, config: Table, dials: Table) -> Table:
        """Return the kinds of layers."""
        by_list = [types.kinds_of_layers(field, config, dials) for field, types in self.lists.items()]
        names = []
        fixed: Table = {}
        for kinds in zip(*by_list, strict=True):
            names.append("_".join(filter(None, (kind.name for kind in kinds))))
            for kind in kinds:
                prefix = f"kinds.{kind.name}."
                given = {dial.removeprefix(prefix): value for dial, value in dials.items() if dial.startswith(prefix)}
                fixed |= {f"kinds.{names[-1]}.{dial}": value for dial, value in (given | {**kind.dials}).items()}
        return {"layers": write_layers(names), **fixed}

    def write(self, name: str, spec: ModelSpec) -> Table:
        """Return all lists."""
        return {key: value for field, types in self.lists.items() for key, value in types.write(field, spec).items()}


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


def every_nth_full(
    interval: int, field: str | None = None, other: str = "sliding_attention"
) -> Callable[[Table, Table], list[str]]:
    """Return a function that returns the types of layers, of which the last of each interval has full attention.

    A field of config.json may have another interval. The type of the others is `other`."""

    def layer_types(config: Table, dials: Table) -> list[str]:
        step = (config.get(field) if field else None) or interval
        layers = range(1, dials["num_layers"] + 1)
        return [other if layer % step else "full_attention" for layer in layers]

    return layer_types

"""Types of the tables of model families.

A dial is a field of ModelSpec by its dotted path, such as "rope.theta". Fields of config.json set dials.

Why: `docs/design/decisions/hf-families.md`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

from phalanx.spec.errors import UserError
from phalanx.spec.model import ModelSpec

Table = dict[str, Any]
"""Values by the names of fields of config.json, or by dials."""


class Field:
    """A field of config.json, or several that belong together. `name` is the key in `Family.fields`."""

    other_names: tuple[str, ...] = ()
    """Further fields of config.json that are read together with this one."""

    @property
    def dials(self) -> Mapping[str, Collection[object] | None]:
        """Dials that the field sets, with the values that it can express; None for all values."""
        return {}

    def read(self, name: str, config: Table, dials: Table) -> Table:
        """Return the dials that a config.json sets. `dials` are those of the fields before this one.

        Raises UserError for a value that Phalanx does not support.
        """
        return {}

    def write(self, name: str, spec: ModelSpec) -> Table:
        """Return the fields of config.json that describe a model."""
        return {}


@dataclass(frozen=True)
class Read(Field):
    """A field with the value of one dial."""

    dial: str
    default: object = None
    """Value if config.json omits the field."""
    words: Mapping[Any, object] | None = None
    """Values of the dial by those of config.json, if they differ. Export writes the first word of a value."""
    unset: Callable[[Table], object] | None = None
    """Function of the dials so far for a value of null or 0."""
    other_names: tuple[str, ...] = ()
    """Names of the field in other versions, which have precedence as in transformers."""

    @property
    def dials(self) -> Mapping[str, Collection[object] | None]:
        """Dial of the field, with the values that have a word."""
        return {self.dial: None if self.words is None else self.words.values()}

    def read(self, name: str, config: Table, dials: Table) -> Table:
        """Return the value of the dial."""
        others = (config[other] for other in self.other_names if config.get(other) is not None)
        value = next(others, config.get(name, self.default))
        if self.words is not None:
            require_supported(name, value, self.words)
            value = self.words[value]
        return {self.dial: self.unset(dials) if self.unset and not value else value}

    def write(self, name: str, spec: ModelSpec) -> Table:
        """Return the field with the value of the dial. A model without experts has 0 of them."""
        if self.dial.startswith("moe.") and spec.moe is None:
            return {name: 0} if self.dial == "moe.num_experts" else {}
        value = attrgetter(self.dial)(spec)
        return {name: value if self.words is None else first_word(self.words, value)}


@dataclass(frozen=True)
class Fixed(Field):
    """A field that is supported with one value only, which is also its default."""

    value: object

    def read(self, name: str, config: Table, dials: Table) -> Table:
        """Return no dials. Raises UserError for another value than the supported one."""
        require_value(name, config.get(name), self.value)
        return {}

    def write(self, name: str, spec: ModelSpec) -> Table:
        """Return the field with its value."""
        return {name: self.value}


@dataclass(frozen=True)
class SameAs(Field):
    """A field that must have the value of a dial, which is also its default."""

    dial: str

    def read(self, name: str, config: Table, dials: Table) -> Table:
        """Return no dials. Raises UserError for another value."""
        require_value(name, config.get(name), dials[self.dial])
        return {}

    def write(self, name: str, spec: ModelSpec) -> Table:
        """Return the field with the value of the dial."""
        return Read(self.dial).write(name, spec)


@dataclass(frozen=True)
class Written(Field):
    """A field that does not affect results, which export writes for other programs: a value, or that of a dial."""

    value: object = None
    dial: str = ""

    def write(self, name: str, spec: ModelSpec) -> Table:
        """Return the field with its value."""
        return {name: attrgetter(self.dial)(spec) if self.dial else self.value}


RowOrder = Callable[[ModelSpec, int], Iterable[int]]
"""Function of a layer (`spec.layers`) and the number of rows of a tensor in a checkpoint. For each of these, it returns
the index of the row in the parameters, one after another along the output axis."""


class Rows:
    """Parameters in one tensor, one after another along the output axis, or their rows in another order.

    `transposed` tensors are stored as [in, out]: GPT-2's Conv1D; None: where their shape says so, as in transformers.
    `unit_axes` of a tensor have length 1 and are none of the parameter, such as the middle one of a convolution of each
    channel. A `stacked` one has that of each expert.

    `alias` is another name of the tensor in its layer, which some files have. Parameters of `joined` are one tensor in
    transformers, which it may save in parts that end anywhere.
    """

    def __init__(
        self,
        *names: str,
        stacked: bool = False,
        transposed: bool | None = False,
        unit_axes: tuple[int, ...] = (),
        order: RowOrder | None = None,
        alias: str = "",
        joined: tuple[str, ...] = (),
    ) -> None:
        self.names = names
        self.transposed = transposed
        self.unit_axes = unit_axes
        self.stacked = stacked
        self.order = order
        self.alias = alias
        self.joined = joined


def rotated_pairs(layer: ModelSpec, rows: int) -> Iterator[int]:
    """Yield the rows of heads in which channels that are rotated together are neighbors, not half of them apart."""
    rotated = layer.rope.width(layer.head_dim)
    channels = [*pairs_of_halves(rotated), *range(rotated, layer.head_dim)]
    for first in range(0, rows, layer.head_dim):
        yield from (first + channel for channel in channels)


def pairs_of_halves(width: int) -> list[int]:
    """Return the channels of two halves in pairs, one of each half."""
    return [channel for pair in zip(range(width // 2), range(width // 2, width), strict=True) for channel in pair]


def alternating_groups(widths: Sequence[int], rows: int) -> Iterator[int]:
    """Yield the rows of several parameters with equally many groups of rows, such as heads, group by group.

    `widths` are the rows of a group in each parameter."""
    groups = rows // sum(widths)
    starts = [groups * sum(widths[:index]) for index in range(len(widths))]
    for group in range(groups):
        for start, width in zip(starts, widths, strict=True):
            yield from range(start + group * width, start + (group + 1) * width)


class OneOf:
    """A tensor that has the parameters of the first entry in some layers, and of others in other layers."""

    def __init__(self, *entries: str | Rows) -> None:
        self.entries = entries


StoredTensors = dict[str, str | Rows | OneOf]
"""Parameters by the name of their tensor in a checkpoint."""


@dataclass(frozen=True)
class MtpLayers:
    """Layers for multi-token prediction in the checkpoints of a family."""

    field: str
    """Field of config.json with their number."""
    tensors: StoredTensors
    """Parameters that only these layers have, by the name of their tensor. {i} is the layer, after all others."""
    prefix: str = "model.layers.{i}."
    """Start of the names of the tensors that other layers have too."""
    maximum: int | None = None
    """Largest number of them, if the names allow no more."""


@dataclass(frozen=True)
class Family:
    """A family of Hugging Face models: its config.json and its tensors."""

    model_type: str
    architecture: str
    """Class in transformers."""
    fields: dict[str, Field]
    """Fields of config.json by name, in the order in which export writes them; besides those of `common_fields`."""
    constants: dict[str, object]
    """Dials with one value in this family. Dials without a field or a constant have the default of ModelSpec."""
    tensors: StoredTensors
    """Parameters by the name of their tensor in the checkpoint. {i} is the layer: parameters are then those of block i.
    {e} means that each expert is a separate tensor."""
    other_tensors: StoredTensors = field(default_factory=dict)
    """Tensors that some files have in place of those of the same parameters. Exports have none of them."""
    expert_tensors: StoredTensors = field(default_factory=dict)
    """Tensors of models with experts, where not all models of the family have them. They may replace others."""
    prefix: str = "model."
    """Start of the tensors' names, which a model that was saved without its head omits."""
    ignored_tensors: tuple[str, ...] = ("*rotary_emb.inv_freq",)
    """Patterns of tensors that are not read: those of old versions that every version computes, and those of layers for
    multi-token prediction, which follow layer {L}, the last one."""
    other_types: tuple[str, ...] = ()
    """Further values of model_type, which published files of the family have."""
    constant_tensors: Mapping[str, float] = field(default_factory=dict)
    """Numbers in the formulas of the model that its files have as tensors, by their name. {i} is the layer."""
    has_optional_experts: bool = False
    """True if models may have 0 experts: an MLP."""
    mtp: MtpLayers | None = None
    """Layers for multi-token prediction, which are read and exported if the model has `mtp`."""
    wrapper: str | None = None
    """model_type of models whose text model is of this family, with its fields in text_config (`wrappers`)."""
    wrapper_ties_embeddings: bool = True
    """True if such a model shares the matrix of embedding and head where its config.json does not say it."""
    exported_tower: Table | None = None
    """A small vision tower, without weights, in exports, if transformers has the text model inside a wrapper only."""
    unused: tuple[str, ...] = ()
    """Dials, or tables of dials, without effect in this family."""

    @property
    def stored_rows(self) -> list[tuple[str, Rows]]:
        """Parameters with the name of their tensor, which may occur several times."""
        return [(name, rows) for name, stored in self.tensors.items() for rows in _entries(stored)]

    def has_mtp_layers(self, count: int) -> bool:
        """Return whether a checkpoint can have this number of layers for multi-token prediction."""
        return self.mtp is not None and count <= (self.mtp.maximum or count)

    def of_mtp_layers(self, count: int) -> Family:
        """Return the family with the tensors of its layers for multi-token prediction.

        Raises UserError if a checkpoint cannot have this number of them."""
        if self.mtp is None or not self.has_mtp_layers(count):
            problem = f"is not supported by checkpoints of type {self.model_type}"
            fix = "remove model.mtp" if self.mtp is None else f"use at most {self.mtp.maximum}"
            raise UserError("model.mtp.layers", count, problem, fix)
        layer = "model.layers.{i}."
        others = {name.replace(layer, self.mtp.prefix): rows for name, rows in self.tensors.items() if layer in name}
        return replace(self, tensors=others | self.mtp.tensors)

    @property
    def dials(self) -> set[str]:
        """Dials that a field or a constant sets."""
        return {*self.constants, *(dial for field in self.fields.values() for dial in field.dials)}

    def stored_in(self, files: Collection[str]) -> Family:
        """Return the family with the tensors that files have, given the names of all of them."""
        others = {
            name: stored
            for name, stored in self.other_tensors.items()
            if any(file.endswith(name.rpartition("{i}")[2].replace("{e}", "0")) for file in files)
        }
        replaced = {name for stored in others.values() for name in _parameter_names(stored)}
        kept = {name: stored for name, stored in self.tensors.items() if not replaced & {*_parameter_names(stored)}}
        return replace(self, tensors=kept | others)

    def values(self, dial: str, default: object) -> Collection[object] | None:
        """Return the values of a dial that the family can express; None for all. `default` is that of ModelSpec."""
        if dial in self.constants:
            return (self.constants[dial],)
        return next((field.dials[dial] for field in self.fields.values() if dial in field.dials), (default,))

    def leaves_out(self, dial: str) -> bool:
        """Return whether a dial has no effect in this family."""
        return any(f"{dial}.".startswith(f"{unused}.") for unused in self.unused)

    def expresses(self, dial: str, value: object, default: object) -> bool:
        """Return whether config.json can say that a dial, or a table of dials, has a value."""
        if self.leaves_out(dial):
            return True
        if any(path.startswith(f"{dial}.") for path in self.dials):
            return value is not None or self.has_optional_experts
        values = self.values(dial, default)
        return values is None or value in values


def _entries(stored: str | Rows | OneOf) -> list[Rows]:
    entries = stored.entries if isinstance(stored, OneOf) else (stored,)
    return [entry if isinstance(entry, Rows) else Rows(entry) for entry in entries]


def _parameter_names(stored: str | Rows | OneOf) -> tuple[str, ...]:
    return tuple(name for rows in _entries(stored) for name in rows.names)


def any_value(*dials: str) -> dict[str, Collection[object] | None]:
    """Return dials of which a field can express all values."""
    return dict.fromkeys(dials)


def first_word(words: Mapping[Any, object], value: object) -> object:
    """Return the first word of config.json for the value of a dial."""
    return next(word for word, meaning in words.items() if meaning == value)


def require_supported(field: str, value: object, supported: Collection[Any]) -> None:
    """Raise UserError for a value of a field of config.json that is not among the supported ones."""
    # A list, because the value may be a JSON list, which has no hash.
    if value not in list(supported):
        fix = f"use a model with one of: {', '.join(map(str, supported))}"
        raise UserError(f"config.json {field}", value, "is not supported", fix=fix)


def require_value(field: str, value: object, expected: object) -> None:
    """Raise UserError for a field of config.json that is present with another value than the expected one."""
    if value is not None and value != expected:
        fix = f"use a model with {field} = {expected}"
        raise UserError(f"config.json {field}", value, "is not supported", fix=fix)

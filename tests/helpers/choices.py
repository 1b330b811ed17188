"""Choices of a run file, and unknown values of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, get_args, get_origin

from phalanx.spec.base import S, Spec
from phalanx.spec.components import ComponentSpec
from phalanx.spec.model import KindSpec
from phalanx.spec.parts.mixers import Mamba2, MixerSpec
from phalanx.spec.parts.mixers.short_convolution import ShortConvolution


def choice_fields(spec_class: type[Spec], path: str) -> Iterator[str]:
    """Yield the paths of all fields of a table, and of the tables in it, that are a `Literal` or a custom component."""
    for name, info in spec_class.model_fields.items():
        if info.exclude:
            continue
        types = [info.annotation, *get_args(info.annotation)]
        if KindSpec in types or MixerSpec in types or Mamba2 in types:
            yield f"{path}.{name}"
            continue
        if ComponentSpec in types or any(get_origin(type_) is Literal for type_ in types):
            yield f"{path}.{name}"
        for type_ in types:
            if isinstance(type_, type) and issubclass(type_, Spec) and type_ is not ComponentSpec:
                yield from choice_fields(type_, f"{path}.{name}")


def with_unknown_value(table: S, path: str) -> S:
    """Return a copy of a table with a value in the field at `path` that its type does not allow."""
    name, _, rest = path.partition(".")
    value: object = with_unknown_value(getattr(table, name), rest) if rest else "unknown"
    if name == "mixer":
        value = ShortConvolution(kind="short_convolution")
    if name == "side_mixer":
        value = Mamba2(kind="mamba2", num_heads=4)
    if isinstance(getattr(table, name), tuple):
        value = (KindSpec(name="unknown"),)
    return table.model_copy(update={name: value})  # unvalidated, like a value of a later version

"""Choices of a run file, and values that they do not have yet."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, get_args, get_origin

from phalanx.spec.base import S, Spec
from phalanx.spec.components import ComponentSpec


def choice_fields(spec_class: type[Spec], path: str) -> Iterator[str]:
    """Yield the paths of all fields of a table, and of the tables in it, that are a `Literal` or a user's component."""
    for name, info in spec_class.model_fields.items():
        types = [info.annotation, *get_args(info.annotation)]
        if ComponentSpec in types or any(get_origin(each) is Literal for each in types):
            yield f"{path}.{name}"
        for each in types:
            if isinstance(each, type) and issubclass(each, Spec) and each is not ComponentSpec:
                yield from choice_fields(each, f"{path}.{name}")


def with_unknown_value(table: S, path: str) -> S:
    """Return a copy of a table with a value in the field at `path` that its type does not allow yet."""
    name, _, rest = path.partition(".")
    value = with_unknown_value(getattr(table, name), rest) if rest else "unknown"
    return table.model_copy(update={name: value})  # unchecked: the value is one of a later version

"""Other values of the fields that a family reads."""

from __future__ import annotations

from typing import Any

from phalanx.spec.families.family import Read, SameAs
from phalanx.spec.families.registry import families

OTHER_VALUES = {"head_dim": 24, "sliding_window": 16, "final_logit_softcapping": 5.0}
"""Values that are neither the default of a small model nor derived from its other sizes."""


def altered_fields(kind: str, config: dict[str, Any]) -> dict[str, Any]:
    """Return another value for each field of a config.json that the table of a family reads into a dial."""
    fields = families()[kind].fields
    altered = {
        name: _altered_value(name, field, config.get(name, field.default))
        for name, field in fields.items()
        if isinstance(field, Read) and (field.words is None or len(set(field.words.values())) > 1)
    }
    by_dial = {field.dial: name for name, field in fields.items() if isinstance(field, Read) and name in altered}
    equal = {
        name: altered[by_dial[field.dial]]
        for name, field in fields.items()
        if isinstance(field, SameAs) and name in config
    }
    return altered | equal


def _altered_value(name: str, field: Read, value: Any) -> Any:
    if name in OTHER_VALUES:
        return OTHER_VALUES[name]
    if field.words is not None:
        return next(word for word, meaning in field.words.items() if meaning != field.words[value])
    if isinstance(value, bool):
        return not value
    return value * 1000 if field.dial == "norm_eps" else 2 * (value or 20)

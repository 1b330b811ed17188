"""Families that are planned but not trained."""

from __future__ import annotations

from phalanx.spec.errors import UserError
from phalanx.spec.families.config_json import model_table
from phalanx.spec.families.family import Read, Table, require_value
from phalanx.spec.families.registry import families

COUNTED_SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "max_position_embeddings"),
)


def has_long_context_factors(config: Table) -> bool:
    """Return whether the rotary embedding of a model of Phi-3's family has a factor for each frequency."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    return bool(rope.get("rope_type", rope.get("type", "default")) != "default")


def counted_model_table(config: Table) -> Table:
    """Return the ModelSpec table with the sizes of a model of `COUNTED_FAMILIES`.

    Raises UserError if the config lacks a size, or has a variant that cannot be counted.
    """
    for field in COUNTED_SIZES:
        if config.get(field) is None:
            raise UserError(f"config.json {field}", None, "is missing", "use the config.json of a complete model")
        if not isinstance(config[field], int):
            raise UserError(f"config.json {field}", config[field], "is not a whole number", "correct the config.json")
    require_value("use_sliding_window", config.get("use_sliding_window"), False)
    base = families()["llama"]
    # Scales of the rotary embedding cost nothing.
    fields = {"hidden_act", "rope_theta", *(name for name, field in base.fields.items() if isinstance(field, Read))}
    table = model_table({name: config[name] for name in fields & config.keys()} | {"model_type": base.model_type})
    table["sliding_window"] = config.get("sliding_window") if "use_sliding_window" not in config else None
    return {field: value for field, value in table.items() if value is not None}

"""All families, found in the modules of this package."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

from phalanx.spec.errors import UserError
from phalanx.spec.families.family import Family, Table, require_supported

EXPORTED_FIRST = ("llama", "mistral", "qwen2", "qwen3", "qwen3_next", "mixtral")
"""Families that export prefers where several can express a model. The others follow in the order of their names."""
COUNTED_FAMILIES = {"phi3": "factors of long contexts"}
"""Families that are planned but not trained, with what a plan leaves out of them: it changes neither time nor memory
noticeably. Their matrices are those of a supported family."""
UNKNOWN_PARTS = {
    "index_topk": "chooses keys by sparse attention",
    "vision_config": "describes a vision tower",
}
"""Fields of families with parts that Phalanx neither trains nor counts."""


@cache
def families() -> dict[str, Family]:
    """Return the families by model_type, in the order in which export tries them."""
    modules = [import_module(f"{__package__}.{module.name}") for module in iter_modules([str(Path(__file__).parent)])]
    values = [value for module in modules for value in vars(module).values()]
    found = {value.model_type: value for value in values if isinstance(value, Family)}
    return {name: found[name] for name in [*EXPORTED_FIRST, *sorted(found.keys() - set(EXPORTED_FIRST))]}


def family_of(config: Table) -> Family:
    """Return the family of a config.json.

    Raises UserError if Phalanx does not support it.
    """
    supported = {name: family for family in families().values() for name in (family.model_type, *family.other_types)}
    model_type = config.get("model_type")
    known = sorted({*supported, *COUNTED_FAMILIES})
    if model_type is None:
        raise UserError("config.json model_type", None, "is missing", f"set it to one of: {', '.join(known)}")
    if model_type not in supported and (part := next(filter(config.get, UNKNOWN_PARTS), None)):
        fix = f"use a model with one of: {', '.join(known)}"
        problem = f"is not supported: its {part} {UNKNOWN_PARTS[part]}, which Phalanx neither trains nor plans"
        raise UserError("config.json model_type", model_type, problem, fix)
    require_supported("model_type", model_type, sorted(supported))
    return supported[str(model_type)]

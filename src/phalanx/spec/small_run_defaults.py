"""Defaults that suit a small run only: a plan of a large model does not write them into its file."""

from __future__ import annotations

from phalanx.spec.learning_rate import is_small_model
from phalanx.spec.run import RunSpec

SMALL_RUN_DEFAULTS = ("data.train", "training.steps", "optimizer.warmup_steps", "checkpoint.every")
"""Fields that depend on the size of a training. Their defaults train a small model in minutes."""


def unset_choices(run: RunSpec) -> dict[str, object]:
    """Return the default of each field of `SMALL_RUN_DEFAULTS` that the run leaves unset."""
    unset = {}
    for field in SMALL_RUN_DEFAULTS:
        table, _, name = field.partition(".")
        if name not in getattr(run, table).model_fields_set:
            unset[field] = getattr(getattr(run, table), name)
    if not run.training.has_decided_steps:
        unset.pop("training.steps", None)
    return unset


def unset_choices_of_large_model(run: RunSpec) -> tuple[list[str], str | None]:
    """Return the fields that a file of a large model omits, and the note that names them; none for a small model."""
    unset = {} if is_small_model(run.model) else unset_choices(run)
    if not unset:
        return [], None
    defaults = ", ".join(
        f"{field} ({', '.join(value) if isinstance(value, list) else value})" for field, value in unset.items()
    )
    note = f"not set, and not written, because the defaults are for small runs: {defaults}. Set them before you train."
    return list(unset), note

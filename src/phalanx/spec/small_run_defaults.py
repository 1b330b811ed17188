"""Defaults that suit a small run only: a plan of a large model does not write them into its file."""

from __future__ import annotations

from phalanx.spec.learning_rate import is_small_model
from phalanx.spec.run import RunSpec

SMALL_RUN_DEFAULTS = (
    "data.train",
    "data.tokenizer",
    "data.tokenizer_vocab",
    "training.steps",
    "optimizer.warmup_steps",
    "checkpoint.every",
)
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
    if run.data.tokenizer != "bpe":  # no tokenizer is trained
        unset.pop("data.tokenizer_vocab", None)
    elif "data.tokenizer_vocab" not in unset:
        unset.pop("data.tokenizer", None)
    return unset


def unset_choices_of_large_model(run: RunSpec) -> tuple[list[str], str | None]:
    """Return the unset fields whose defaults do not suit a large model, and the note that names them.

    There are none for a small model.
    """
    unset = {} if is_small_model(run.model) else unset_choices(run)
    if not unset:
        return [], None
    if "data.tokenizer_vocab" in unset:
        unset["data.tokenizer_vocab"] = f"{run.data.tokenizer_vocab}; the model has {run.model.vocab_size}"
    defaults = ", ".join(
        f"{field} ({', '.join(value) if isinstance(value, list) else value})" for field, value in unset.items()
    )
    note = f"not set: {defaults}. These defaults are for small runs; set the fields before you train."
    return list(unset), note

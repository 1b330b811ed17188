"""Text models of multimodal models. Their other tensors are not read, and an export is the text model alone."""

from __future__ import annotations

from phalanx.spec.families.family import Table
from phalanx.spec.families.registry import families

PREFIXES = ("model.language_model.", "language_model.model.", "language_model.")
"""Starts of the names of the text model's tensors in files of a wrapper, in place of "model." or nothing."""
OTHER_TENSORS = ("*vision_tower.*", "*multi_modal_projector.*", "*mm_projector.*", "model.visual.*")
"""Patterns of the tensors that belong to images."""


def text_config(config: Table) -> Table:
    """Return the config.json of the text model of a multimodal one; others are returned as they are."""
    model_type = config.get("model_type")
    family = next((family for family in families().values() if family.wrapper and family.wrapper == model_type), None)
    if family is None:
        return config
    # transformers ties the head by the outer field.
    is_tied = config.get("tie_word_embeddings", family.wrapper_ties_embeddings)
    return (config.get("text_config") or {}) | {"model_type": family.model_type, "tie_word_embeddings": is_tied}

"""Text models of multimodal models. Their other tensors are not read, and an export is the text model alone."""

from __future__ import annotations

from phalanx.spec.families.family import Table
from phalanx.spec.families.registry import families

PREFIXES = ("model.language_model.", "language_model.model.", "language_model.")
"""Starts of the names of the text model's tensors in files of a wrapper, in place of "model." or nothing."""
OTHER_TENSORS = (
    *("*vision_tower.*", "*multi_modal_projector.*", "*mm_projector.*", "*embed_vision.*", "*audio_tower.*"),
    *("*embed_audio.*", "model.visual.*", "*vision_model.*"),
)
"""Patterns of the tensors that belong to images and sound."""

DEFAULT_TEXT_TYPES = {"mistral3": "mistral"}
"""model_type of the text model where the wrapper does not say it, if there are several."""


def text_config(config: Table) -> Table:
    """Return the config.json of the text model of a multimodal one; others are returned as they are."""
    wrapper = config.get("model_type")
    text_types = [family.model_type for family in families().values() if family.wrapper and family.wrapper == wrapper]
    if not text_types:
        return config
    text = config.get("text_config") or {}
    text_type = text.get("model_type") or DEFAULT_TEXT_TYPES.get(str(wrapper), text_types[0])
    # transformers ties the head by the outer field.
    ties = text_type not in families() or families()[text_type].wrapper_ties_embeddings
    return text | {"model_type": text_type, "tie_word_embeddings": config.get("tie_word_embeddings", ties)}

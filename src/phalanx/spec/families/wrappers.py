"""Text models of multimodal models. Their other tensors are not read, and an export is the text model alone."""

from __future__ import annotations

from phalanx.spec.families.family import Table
from phalanx.spec.families.registry import families

PREFIXES = ("model.language_model.", "language_model.model.", "language_model.")
"""Starts of the names of the text model's tensors in files of a wrapper, in place of "model." or nothing."""
OTHER_TENSORS = (
    *("*vision_tower.*", "*multi_modal_projector.*", "*mm_projector.*", "*embed_vision.*", "*audio_tower.*"),
    *("*embed_audio.*", "model.visual.*", "visual.*", "*vision_model.*", "patch_merge_mlp.*"),
    *("model.vision_adapter.*", "model.vision_projection.*", "vit_large_projector.*"),
)
"""Patterns of the tensors that belong to images and sound."""

DEFAULT_TEXT_TYPES = {"mistral3": "mistral"}
"""model_type of the text model where the wrapper does not say it, if there are several."""
VISION_FIELDS = frozenset(
    {
        *("vision_config", "image_token_id", "video_token_id", "vision_token_id"),
        *("vision_start_token_id", "vision_end_token_id"),
    }
)
"""Fields of images in files of a wrapper that have those of the text model too."""
PLAIN_TEXT_TYPES: dict[str, Table] = {
    "qwen2_5_vl": {
        "model_type": "qwen2",
        "vocab_size": 152064,
        "hidden_size": 8192,
        "intermediate_size": 29568,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "max_window_layers": 80,
    },
    "qwen3_vl": {
        "model_type": "qwen3",
        "intermediate_size": 22016,
        "num_key_value_heads": 32,
        "max_position_embeddings": 128_000,
        "rope_theta": 500_000.0,
    },
    "qwen3_vl_moe": {
        "model_type": "qwen3_moe",
        "intermediate_size": 5632,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "max_position_embeddings": 128_000,
        "rope_theta": 500_000.0,
        "moe_intermediate_size": 1408,
        "num_experts": 60,
        "num_experts_per_tok": 4,
    },
}
"""Families of the text models of wrappers, where transformers has no class for these alone, with the defaults of fields
that are others than in the family."""
FIXED_TEXT_FIELDS: dict[str, Table] = {"qwen3_vl_moe": {"norm_topk_prob": True}}
"""Fields of the family that transformers does not read in a wrapper."""


def text_config(config: Table) -> Table:
    """Return the config.json of the text model of a multimodal one; others are returned as they are."""
    wrapper = config.get("model_type")
    if wrapper in PLAIN_TEXT_TYPES:
        return _plain_text_config(config)
    text_types = [family.model_type for family in families().values() if family.wrapper and family.wrapper == wrapper]
    if not text_types:
        return config
    text = config.get("text_config") or {}
    text_type = text.get("model_type") or DEFAULT_TEXT_TYPES.get(str(wrapper), text_types[0])
    # transformers ties the head by the outer field.
    ties = text_type not in families() or families()[text_type].wrapper_ties_embeddings
    return text | {"model_type": text_type, "tie_word_embeddings": config.get("tie_word_embeddings", ties)}


def wrapped_config(config: Table) -> Table:
    """Return the config.json of an exported text model, in its wrapper if transformers has it there only."""
    family = families()[config["model_type"]]
    if family.exported_tower is None:
        return config
    of_whole = ("torch_dtype", "dtype")
    whole = {field: value for field, value in config.items() if field in (*of_whole, "tie_word_embeddings")}
    text = {field: value for field, value in config.items() if field not in (*of_whole, "architectures")}
    whole |= {"architectures": [family.architecture], "model_type": family.wrapper}
    return whole | {"text_config": text, "vision_config": family.exported_tower}


def _plain_text_config(config: Table) -> Table:
    """Return the config.json of a text model that is a plain one but for positions, which are equal in text.

    Older files have no text_config, but its fields and those of images together."""
    wrapper = str(config["model_type"])
    text = config.get("text_config") or {name: value for name, value in config.items() if name not in VISION_FIELDS}
    defaults = PLAIN_TEXT_TYPES[wrapper]
    plain = {**defaults, **text, **FIXED_TEXT_FIELDS.get(wrapper, {}), "model_type": defaults["model_type"]}
    for table in ("rope_parameters", "rope_scaling"):
        if rope := plain.get(table):
            rope = {name: value for name, value in rope.items() if name not in ("mrope_section", "mrope_interleaved")}
            types = {name: "default" for name in ("type", "rope_type") if rope.get(name) == "mrope"}
            plain[table] = rope | types
    # Files of transformers before 5 may have it in text_config.
    ties = config.get("tie_word_embeddings") or (wrapper == "qwen2_5_vl" and text.get("tie_word_embeddings"))
    return plain | {"tie_word_embeddings": bool(ties)}

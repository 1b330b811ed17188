"""Attention windows in a Hugging Face config.json."""

from __future__ import annotations

from phalanx.spec.files.hf_families import FAMILY_DEFAULTS, Table, require_supported
from phalanx.spec.model import ModelSpec


def parse_window(model_type: str, config: Table) -> Table:
    """Return the attention window and the layers without it; no fields if no layer has one."""
    has_window = "sliding_window" in FAMILY_DEFAULTS[model_type] and config.get("use_sliding_window", True)
    window: int | None = config["sliding_window"] if has_window else None
    full_layers = _full_attention_layers(config, window) if model_type == "qwen3" else []
    if window is None or len(full_layers) == config["num_hidden_layers"]:
        return {}
    return {"sliding_window": window, **({"full_attention_layers": full_layers} if full_layers else {})}


def _full_attention_layers(config: Table, window: int | None) -> list[int]:
    """Return the layers of a Qwen3 without a window."""
    layer_types = config["layer_types"]
    if layer_types is None:
        return list(range(min(config["max_window_layers"], config["num_hidden_layers"])))
    windowed = [] if window is None else ["sliding_attention"]
    for layer_type in layer_types:
        require_supported("layer_types", layer_type, ["full_attention", *windowed])
    return [layer for layer, layer_type in enumerate(layer_types) if layer_type == "full_attention"]


def window_fields(model_type: str, spec: ModelSpec) -> Table:
    """Return the fields of config.json that describe the window of `spec`."""
    window = spec.sliding_window
    if model_type in ("mistral", "mixtral"):
        return {"sliding_window": window}
    if window is None:
        return {}
    config: Table = {"use_sliding_window": True, "sliding_window": window}
    if model_type == "qwen3":
        config["max_window_layers"] = 0
    if spec.full_attention_layers:
        is_full = (spec.attention_window(layer) is None for layer in range(spec.num_layers))
        config["layer_types"] = ["full_attention" if full else "sliding_attention" for full in is_full]
    return config

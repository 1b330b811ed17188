"""SmolLM3: every fourth layer without positions."""

from __future__ import annotations

from dataclasses import replace

from phalanx.spec.families.family import Field, Fixed, Read, Table
from phalanx.spec.families.forms import NOPE, ROTARY, EqualLayers, LayerTypes, Rope
from phalanx.spec.families.llama import LLAMA, query_heads


def rotary_layers(config: Table, dials: Table) -> list[int]:
    """Return 1 for each layer with positions, and 0 for the last of each interval."""
    interval = config.get("no_rope_layer_interval", 4)
    return [int((layer + 1) % interval != 0) for layer in range(dials["num_layers"])]


SMOLLM3 = replace(
    LLAMA,
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    fields=LLAMA.fields
    | {
        "vocab_size": Read("vocab_size", 128256),
        "hidden_size": Read("hidden_size", 2048),
        "num_hidden_layers": Read("num_layers", 36),
        "num_attention_heads": Read("num_heads", 16),
        "num_key_value_heads": Read("num_kv_heads", 4, unset=query_heads),
        "max_position_embeddings": Read("max_seq_len", 32768),
        "tie_word_embeddings": Read("tie_embeddings", True),
        "rope_parameters": Rope(theta=2_000_000.0),
        "no_rope_layers": LayerTypes({1: ROTARY, 0: NOPE}, rotary_layers, ("no_rope_layer_interval",)),
        "use_sliding_window": Fixed(False),
        "sliding_window": Field(),
        "layer_types": EqualLayers(),
    },
)

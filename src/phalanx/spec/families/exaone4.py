"""EXAONE 4: windows with positions in three of four layers, and full attention without."""

from __future__ import annotations

from dataclasses import replace

from phalanx.spec.families.family import Fixed, Read, Table
from phalanx.spec.families.forms import FULL_NOPE, WINDOW, LayerTypes, every_nth_full
from phalanx.spec.families.llama import query_heads
from phalanx.spec.families.olmo import OLMO2


class HybridLayers(LayerTypes):
    """List of the type of each layer; without a window, all have full attention and positions."""

    def read(self, name: str, config: Table, dials: Table) -> Table:
        """Return the kinds of layers, if there is a window."""
        return {} if dials["sliding_window"] is None else super().read(name, config, dials)


EXAONE4 = replace(
    OLMO2,
    model_type="exaone4",
    architecture="Exaone4ForCausalLM",
    fields=OLMO2.fields
    | {
        "vocab_size": Read("vocab_size", 102400),
        "num_key_value_heads": Read("num_kv_heads", 32, unset=query_heads),
        "intermediate_size": Read("ffn_hidden_size", 16384),
        "attention_bias": Fixed(False),
        "sliding_window": Read("sliding_window", 4096),
        # Published files have letters, such as "LLLG", and the list of types.
        "layer_types": HybridLayers(
            {"sliding_attention": WINDOW, "full_attention": FULL_NOPE},
            every_nth_full(4, "sliding_window_pattern"),
            ("sliding_window_pattern",),
        ),
    },
    constants={"qk_norm": "head", "norm_position": "after"},
)

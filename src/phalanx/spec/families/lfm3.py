"""LFM3: short convolutions, windows and full attention, with gates of heads and norms before and after all parts."""

from __future__ import annotations

from dataclasses import replace

from phalanx.spec.families.family import Fixed, Read, Table
from phalanx.spec.families.forms import FULL, WINDOW, LayerTypes, OfKind
from phalanx.spec.families.gemma4 import RopeOfWideHeads
from phalanx.spec.families.lfm2 import CONVOLUTION, LFM2
from phalanx.spec.families.llama import ATTENTION_BIAS, LLAMA, QK_NORM_TENSORS

LFM3_ROPES: Table = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 1_000_000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}


def layer_types(config: Table, dials: Table) -> list[str]:
    """Return the type of each layer: of four, the first has a window and the third full attention."""
    period = ("sliding_attention", "conv", "full_attention", "conv")
    return ["conv", *(period[layer % 4] for layer in range(1, dials["num_layers"]))]


LFM3 = replace(
    LFM2,
    model_type="lfm3",
    architecture="Lfm3ForCausalLM",
    fields={
        "vocab_size": Read("vocab_size", 128_000),
        "hidden_size": Read("hidden_size", 2048),
        "num_hidden_layers": Read("num_layers", 24),
        "num_attention_heads": Read("num_heads", 16),
        "num_key_value_heads": Read("num_kv_heads", 4),
        "head_dim": Read("head_dim", 128),
        "intermediate_size": Read("ffn_hidden_size", 7680),
        "max_position_embeddings": Read("max_seq_len", 128_000),
        "norm_eps": Read("norm_eps", 1e-5, other_names=("rms_norm_eps",)),
        "tie_word_embeddings": Read("tie_embeddings", True),
        "attention_bias": ATTENTION_BIAS,
        "sliding_window": Read("sliding_window", 256),
        "use_sandwich_norm": Read("norm_position", True, words={True: "both", False: "before"}),
        "use_attention_gate": Read("attention_gate", True, words={True: "head", False: "none"}),
        "layer_types": LayerTypes(
            {"conv": CONVOLUTION, "sliding_attention": WINDOW, "full_attention": FULL}, layer_types
        ),
        # A theta at the top level is that of both tables; rope_scaling would replace both.
        "rope_parameters": RopeOfWideHeads(
            theta=1_000_000.0, window_theta=1_000_000.0, window_field="rope_theta", tables=LFM3_ROPES
        ),
        "rope_scaling": Fixed(None),
        "conv_L_cache": OfKind(CONVOLUTION, Read("mixer.kernel_size", 7)),
        "conv_bias": OfKind(CONVOLUTION, Read("mixer.bias", False)),
    },
    tensors={
        **{name: stored for name, stored in LFM2.tensors.items() if "self_attn" not in name},
        **{name: stored for name, stored in LLAMA.tensors.items() if "self_attn" in name},
        **QK_NORM_TENSORS,
        "model.layers.{i}.self_attn.gate_proj.weight": "attention.wg.weight",
        "model.layers.{i}.post_operator_norm.weight": "attention_after.weight",
        "model.layers.{i}.post_ffn_norm.weight": "mlp_after.weight",
    },
)

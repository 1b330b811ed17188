"""OLMo: norms without parameters; OLMo 2: norms after attention and MLP; OLMo 3: windows in three of four layers."""

from __future__ import annotations

from dataclasses import replace

from phalanx.spec.families.family import Read
from phalanx.spec.families.forms import FULL, WINDOW, LayerTypes, RopeByType, every_nth_full
from phalanx.spec.families.llama import CLIP, LLAMA, QK_NORM_TENSORS

OLMO = replace(
    LLAMA,
    model_type="olmo",
    architecture="OlmoForCausalLM",
    fields={name: field for name, field in LLAMA.fields.items() if name != "rms_norm_eps"}
    | {"vocab_size": Read("vocab_size", 50304), "clip_qkv": CLIP},
    constants={"norm": "layernorm", "norm_parameters": "none", "norm_eps": 1e-5},
    tensors={name: stored for name, stored in LLAMA.tensors.items() if "norm" not in name},
)

OLMO2 = replace(
    LLAMA,
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    fields=LLAMA.fields | {"vocab_size": Read("vocab_size", 50304), "rms_norm_eps": Read("norm_eps", 1e-5)},
    constants={"qk_norm": "full", "norm_position": "after"},
    tensors={name: stored for name, stored in LLAMA.tensors.items() if "layernorm" not in name}
    | QK_NORM_TENSORS
    | {
        "model.layers.{i}.post_attention_layernorm.weight": "attention_after.weight",
        "model.layers.{i}.post_feedforward_layernorm.weight": "mlp_after.weight",
    },
)

OLMO3 = replace(
    OLMO2,
    model_type="olmo3",
    architecture="Olmo3ForCausalLM",
    fields=OLMO2.fields
    | {
        "rope_parameters": RopeByType(theta=500_000.0, window_theta=500_000.0),
        "sliding_window": Read("sliding_window", 4096),
        "layer_types": LayerTypes({"sliding_attention": WINDOW, "full_attention": FULL}, every_nth_full(4)),
    },
)

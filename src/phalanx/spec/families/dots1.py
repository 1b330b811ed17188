"""dots.llm1: the attention of Qwen3 and the experts of DeepSeek-V3."""

from __future__ import annotations

from dataclasses import replace

from phalanx.spec.families.family import Read, Table
from phalanx.spec.families.forms import LayerWindow, Rope
from phalanx.spec.families.glm4_moe import GLM4_MOE
from phalanx.spec.families.llama import ATTENTION_BIAS, query_heads
from phalanx.spec.model import ModelSpec


class WindowOfLastLayers(LayerWindow):
    """Window of the layers of layer_types, or of those from max_window_layers on; null: none."""

    other_names = ("max_window_layers", "layer_types")

    def read(self, name: str, config: Table, dials: Table) -> Table:
        """Return the window and the layers without it, if some have it."""
        return super().read(name, {name: 4096, "max_window_layers": 62, **config}, dials)

    def write(self, name: str, spec: ModelSpec) -> Table:
        """Return the window and the layers that have it, or null."""
        return super().write(name, spec) or {name: None}


DOTS1 = replace(
    GLM4_MOE,
    mtp=None,
    model_type="dots1",
    architecture="Dots1ForCausalLM",
    fields={
        name: field for name, field in GLM4_MOE.fields.items() if name not in ("use_qk_norm", "partial_rotary_factor")
    }
    | {
        "vocab_size": Read("vocab_size", 152064),
        "hidden_size": Read("hidden_size", 4608),
        "num_hidden_layers": Read("num_layers", 62),
        "num_attention_heads": Read("num_heads", 32),
        "num_key_value_heads": Read("num_kv_heads", 32, unset=query_heads),
        "max_position_embeddings": Read("max_seq_len", 2048),
        "rms_norm_eps": Read("norm_eps", 1e-6),
        "attention_bias": ATTENTION_BIAS,
        "rope_parameters": Rope(),
        "sliding_window": WindowOfLastLayers(),
        "n_routed_experts": Read("moe.num_experts", None, other_names=("num_local_experts",)),
        "num_experts_per_tok": Read("moe.top_k", None),
        "n_shared_experts": Read("moe.num_shared_experts", None),
        "first_k_dense_replace": Read("moe.num_leading_dense_layers", 0),
        "norm_topk_prob": Read("moe.normalize_top_k", False, words={True: True, False: False, None: False}),
    },
    constants=GLM4_MOE.constants | {"qk_norm": "head"},
    ignored_tensors=GLM4_MOE.ignored_tensors[:1],
)

"""MiMo-V2-Flash: values narrower than keys, and sinks and twice the key/value heads in layers with a window."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from phalanx.spec.errors import UserError
from phalanx.spec.families.family import Field, Fixed, Read, Table, any_value, require_value
from phalanx.spec.families.forms import (
    FULL,
    MLP_TYPES,
    WINDOW,
    LayerLists,
    LayerTypes,
    Repeated,
    RopeTables,
)
from phalanx.spec.families.glm4_moe import GLM4_MOE
from phalanx.spec.families.llama import EXPERT_TENSORS, LLAMA, query_heads
from phalanx.spec.model import ModelSpec


@dataclass(frozen=True)
class KeyValueHeads(Read):
    """Number of key/value heads of full attention. Layers with a window have twice as many."""

    @property
    def dials(self) -> Mapping[str, Collection[object] | None]:
        """Dials of both."""
        return any_value(self.dial, "kinds.window.num_kv_heads")

    def read(self, name: str, config: Table, dials: Table) -> Table:
        """Return both numbers."""
        read = super().read(name, config, dials)
        return {**read, "kinds.window.num_kv_heads": 2 * read[self.dial]}


@dataclass(frozen=True)
class Window(Read):
    """Window, which published files also give as the number of earlier tokens; that has precedence."""

    other_names: tuple[str, ...] = ("sliding_window_size",)

    def read(self, name: str, config: Table, dials: Table) -> Table:
        """Return the window."""
        earlier = config.get("sliding_window_size")
        return {self.dial: config.get(name, self.default) if earlier is None else earlier + 1}

    def write(self, name: str, spec: ModelSpec) -> Table:
        """Return both."""
        window = spec.sliding_window
        return {name: window, "sliding_window_size": None if window is None else window - 1}


@dataclass(frozen=True)
class RepeatedRopes(RopeTables):
    """Rotary embeddings of both types of layers. Published files repeat the default ones in fields of their own."""

    other_names: tuple[str, ...] = ("rope_theta", "swa_rope_theta", "partial_rotary_factor")

    def read(self, name: str, config: Table, dials: Table) -> Table:
        """Return the dials of both embeddings. Raises UserError for fields that contradict the tables."""
        read = super().read(name, config, dials)
        for kind, theta in (("", "rope_theta"), ("kinds.window.", "swa_rope_theta")):
            require_value(theta, config.get(theta), read[f"{kind}rope.theta"])
            require_value("partial_rotary_factor", config.get("partial_rotary_factor"), read[f"{kind}rope.fraction"])
        return read


@dataclass(frozen=True)
class RepeatedTypes(Field):
    """A list of published files that repeats that of the types of layers, which transformers reads, by other words."""

    field: str
    words: Mapping[object, str]
    absent: LayerTypes

    def read(self, name: str, config: Table, dials: Table) -> Table:
        """Return no dials. Raises UserError for another type of a layer."""
        types = list(self.absent.words(self.field, config, dials))
        listed = config.get(name)
        if listed is not None and [self.words.get(word) for word in listed] != types:
            raise UserError(f"config.json {name}", listed, f"contradicts {self.field}", f"set {self.field}")
        return {}


ROPES = {
    "full_attention": {"rope_type": "default", "rope_theta": 5_000_000.0, "partial_rotary_factor": 0.334},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.334},
}
WINDOW_WITH_SINKS = replace(WINDOW, dials={"attention_sinks": True})
ATTENTION_TYPES = LayerTypes(
    {"sliding_attention": WINDOW_WITH_SINKS, "full_attention": FULL},
    lambda config, dials: [
        "sliding_attention" if layer and (layer + 1) % 6 else "full_attention" for layer in range(dials["num_layers"])
    ],
)

MIMO_V2_FLASH = replace(
    LLAMA,
    model_type="mimo_v2_flash",
    architecture="MiMoV2FlashForCausalLM",
    fields=LLAMA.fields
    | {
        "vocab_size": Read("vocab_size", 152576),
        "num_hidden_layers": Read("num_layers", 48),
        "num_attention_heads": Read("num_heads", 64),
        "num_key_value_heads": KeyValueHeads("num_kv_heads", 4, unset=query_heads),
        "head_dim": Read("head_dim", 192),
        "v_head_dim": Read("value_head_dim", 128),
        "attention_value_scale": Read("value_scale", 0.707, unset=lambda dials: 1.0),
        "intermediate_size": Read("ffn_hidden_size", 16384),
        "max_position_embeddings": Read("max_seq_len", 131_072),
        "rms_norm_eps": Read("norm_eps", 1e-5),
        "attention_bias": Read("attention_bias", False, words={False: "none", True: "qkv", None: "none"}),
        "rope_parameters": RepeatedRopes(fraction=0.334, absent=ROPES),
        "sliding_window": Window("sliding_window", 129),
        "moe_intermediate_size": Read("moe.expert_ffn_size", 2048),
        "n_routed_experts": Read("moe.num_experts", 256, other_names=("num_local_experts",)),
        "num_experts_per_tok": Read("moe.top_k", 8),
        "routed_scaling_factor": Read("moe.routed_scale", 1.0, unset=lambda dials: 1.0),
        "n_group": Read("moe.num_groups", 1),
        "topk_group": Read("moe.top_groups", 1),
        "norm_topk_prob": Read("moe.normalize_top_k", True),
        "layer_types": LayerLists({"layer_types": ATTENTION_TYPES, "mlp_layer_types": MLP_TYPES}),
        # Fields of published files, which transformers does not read.
        "hybrid_layer_pattern": RepeatedTypes(
            "layer_types", {0: "full_attention", 1: "sliding_attention"}, ATTENTION_TYPES
        ),
        "moe_layer_freq": RepeatedTypes("mlp_layer_types", {0: "dense", 1: "sparse"}, MLP_TYPES),
        "layernorm_epsilon": Repeated("norm_eps"),
        "partial_rotary_factor": Field(),  # read with the tables
        "swa_num_attention_heads": Repeated("num_heads"),
        "swa_num_key_value_heads": Repeated("num_kv_heads", times=2),
        "swa_head_dim": Repeated("head_dim"),
        "swa_v_head_dim": Repeated("value_head_dim"),
        "add_swa_attention_sink_bias": Fixed(True),
        "add_full_attention_sink_bias": Fixed(False),
        "n_shared_experts": Fixed(None),
        "topk_method": Fixed("noaux_tc"),
        "scoring_func": Fixed("sigmoid"),
        **dict.fromkeys(("attention_chunk_size", "num_nextn_predict_layers"), Field()),
    },
    constants=GLM4_MOE.constants | {"qk_norm": "none"},
    unused=GLM4_MOE.unused,
    tensors=LLAMA.tensors
    | EXPERT_TENSORS
    | {
        "model.layers.{i}.self_attn.attention_sink_bias": "attention.sinks",
        "model.layers.{i}.mlp.gate.e_score_correction_bias": "mlp.router.bias",
    },
    ignored_tensors=(*LLAMA.ignored_tensors, "model.mtp.*"),
)

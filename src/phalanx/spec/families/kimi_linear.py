"""Kimi Linear: Kimi Delta Attention in three of four layers, and latent attention without positions."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from phalanx.spec.families.deepseek import (
    ATTENTION,
    DEEPSEEK_V3,
    LATENT,
    LATENT_TENSORS,
    WidthWithoutRotation,
    rotated_last,
)
from phalanx.spec.families.family import Family, Field, Fixed, OneOf, Read, Rows, SameAs, StoredTensors, Table, Written
from phalanx.spec.families.forms import LayerKind, LayerTypes, leading_dense
from phalanx.spec.families.llama import ATTENTION_BIAS, LLAMA, shared_expert_tensors
from phalanx.spec.layers import layer_specs
from phalanx.spec.model import ModelSpec


def has_delta(layer: ModelSpec) -> bool:
    """Return whether the mixer of a layer is Kimi Delta Attention."""
    return layer.mixer is not None and layer.mixer.kind == "kimi_delta"


DELTA_DIALS = {"mixer.kind": "kimi_delta"}
DELTA = LayerKind("delta", lambda layer: has_delta(layer) and layer.moe is not None, DELTA_DIALS)
DENSE_DELTA = LayerKind(
    "dense_delta", lambda layer: has_delta(layer) and layer.moe is None, {**DELTA_DIALS, "moe": False}
)
FULL = LayerKind("full", lambda layer: not has_delta(layer) and layer.moe is not None)
DENSE_FULL = LayerKind("dense_full", lambda layer: not has_delta(layer) and layer.moe is None, {"moe": False})
HUB_TABLE = "linear_attn_config"
"""Table of the published config.json with the lists of layers, which count from 1, and the sizes of KDA."""

HUB_LISTS = {"full_attn_layers": "full_attention", "kda_layers": "linear_attention"}


def mixer_types(config: Table, num_layers: int) -> Sequence[str | None]:
    """Return the type of the mixer of each layer."""
    table = config.get(HUB_TABLE) or {}
    if config.get("layer_types"):
        return list(config["layer_types"])
    if HUB_LISTS.keys() <= table.keys():
        types = {layer: word for layers, word in HUB_LISTS.items() for layer in table[layers]}
        return [types.get(layer) for layer in range(1, num_layers + 1)]
    return ["full_attention" if i and i % 4 == 0 else "linear_attention" for i in range(num_layers)]


def mixer_and_mlp_types(config: Table, dials: Table) -> list[tuple[str | None, str]]:
    """Return the types of the mixer and of the MLP of each layer."""
    num_layers = dials["num_layers"]
    num_dense = config.get("first_k_dense_replace", 1)
    mlp_types = config.get("mlp_layer_types") or leading_dense(num_dense, num_layers)
    return list(zip(mixer_types(config, num_layers), mlp_types, strict=False))


class MixerAndMlpTypes(LayerTypes):
    """Lists of the types of the mixer and of the MLP of each layer."""

    def read(self, name: str, config: Table, dials: Table) -> Table:
        """Return the kinds of layers."""
        return super().read(name, {name: self.absent(config, dials)}, dials)

    def write(self, name: str, spec: ModelSpec) -> Table:
        """Return both lists, and those of published files."""
        mixers, mlps = zip(*super().write(name, spec)[name], strict=True)
        delta = next((layer.mixer for layer in layer_specs(spec) if has_delta(layer)), None)
        table = {size.hub_name: getattr(delta, size.dial) for size in DELTA_SIZES.values() if delta}
        table |= {
            layers: [layer for layer, mixer in enumerate(mixers, 1) if mixer == word]
            for layers, word in HUB_LISTS.items()
        }
        return {name: list(mixers), "mlp_layer_types": list(mlps), HUB_TABLE: table}


@dataclass(frozen=True)
class OfDelta(Field):
    """A size of Kimi Delta Attention, which published files have in a table."""

    dial: str
    default: int
    hub_name: str

    @property
    def dials(self) -> Mapping[str, Collection[object] | None]:
        """Dial of both kinds of layers with it."""
        return dict.fromkeys(f"kinds.{kind.name}.mixer.{self.dial}" for kind in (DELTA, DENSE_DELTA))

    def read(self, name: str, config: Table, dials: Table) -> Table:
        """Return the size in both kinds."""
        size = (config.get(HUB_TABLE) or {}).get(self.hub_name, config.get(name, self.default))
        return dict.fromkeys(self.dials, size)

    def write(self, name: str, spec: ModelSpec) -> Table:
        """Return the size in the first layer with Kimi Delta Attention."""
        sizes = (getattr(layer.mixer, self.dial) for layer in layer_specs(spec) if has_delta(layer))
        return {name: next(sizes, self.default)}


DELTA_SIZES = {
    "linear_num_heads": OfDelta("num_heads", 32, "num_heads"),
    "linear_head_dim": OfDelta("head_dim", 128, "head_dim"),
    "linear_conv_kernel_dim": OfDelta("kernel_size", 4, "short_conv_kernel_size"),
}
EXPERTS = "model.layers.{i}.block_sparse_moe."
MIXER_TENSORS: StoredTensors = {
    **LATENT_TENSORS,
    f"{ATTENTION}q_proj.weight": OneOf("attention.query.weight", Rows("attention.wq.weight", order=rotated_last)),
    f"{ATTENTION}k_proj.weight": "attention.key.weight",
    f"{ATTENTION}v_proj.weight": "attention.value.weight",
    **{
        f"{ATTENTION}{name[0]}_conv1d.weight": Rows(f"attention.{name}_taps", unit_axes=(1,))
        for name in ("query", "key", "value")
    },
    f"{ATTENTION}A_log": Rows("attention.A_log", unit_axes=(0, 1, 3)),
    f"{ATTENTION}dt_bias": "attention.dt_bias",
    f"{ATTENTION}f_a_proj.weight": "attention.decay_latent.weight",
    f"{ATTENTION}f_b_proj.weight": "attention.decay.weight",
    f"{ATTENTION}b_proj.weight": "attention.update.weight",
    f"{ATTENTION}g_a_proj.weight": "attention.output_gate_latent.weight",
    f"{ATTENTION}g_b_proj.weight": "attention.output_gate.weight",
    f"{ATTENTION}o_norm.weight": "attention.norm.weight",
    f"{ATTENTION}o_proj.weight": OneOf("attention.out.weight", "attention.wo.weight"),
    f"{ATTENTION}o_proj.bias": "attention.wo.bias",
}

KIMI_LINEAR = Family(
    model_type="kimi_linear",
    architecture="KimiLinearForCausalLM",
    fields={
        "vocab_size": Read("vocab_size", 163840),
        "hidden_size": Read("hidden_size", 2304),
        "num_hidden_layers": Read("num_layers", 27),
        "num_attention_heads": Read("num_heads", 32),
        "num_key_value_heads": SameAs("num_heads"),
        "q_lora_rank": Read("mixer.query_rank", None),
        "kv_lora_rank": Read("mixer.latent_rank", 512),
        "qk_rope_head_dim": Read("mixer.rope_dim", 64),
        "qk_nope_head_dim": WidthWithoutRotation("head_dim", 128),
        "v_head_dim": Read("mixer.value_dim", 128),
        "qk_head_dim": SameAs("head_dim"),
        "intermediate_size": Read("ffn_hidden_size", 9216),
        "model_max_length": Read("max_seq_len", 1048576, other_names=("max_position_embeddings",)),
        "rms_norm_eps": Read("norm_eps", 1e-5),
        "hidden_act": Fixed("silu"),
        "tie_word_embeddings": Written(False),  # transformers has two matrices whatever it says
        "attention_bias": ATTENTION_BIAS,
        "mla_use_nope": Fixed(True),
        "moe_intermediate_size": Read("moe.expert_ffn_size", 1024),
        "num_experts": Read("moe.num_experts", 256, other_names=("num_local_experts",)),
        "num_experts_per_token": Read("moe.top_k", 8, other_names=("num_experts_per_tok",)),
        "num_shared_experts": Read("moe.num_shared_experts", 1, other_names=("n_shared_experts",)),
        "moe_renormalize": Read("moe.normalize_top_k", True, other_names=("norm_topk_prob",)),
        "num_expert_group": Read("moe.num_groups", 1, other_names=("n_group",)),
        "topk_group": Read("moe.top_groups", 1),
        "routed_scaling_factor": Read("moe.routed_scale", 2.446),
        "moe_router_activation_func": Fixed("sigmoid"),
        "use_grouped_topk": Fixed(True),
        "moe_layer_freq": Fixed(1),
        "layer_types": MixerAndMlpTypes(
            {
                ("linear_attention", "sparse"): DELTA,
                ("linear_attention", "dense"): DENSE_DELTA,
                ("full_attention", "sparse"): FULL,
                ("full_attention", "dense"): DENSE_FULL,
            },
            mixer_and_mlp_types,
            ("mlp_layer_types", "first_k_dense_replace", HUB_TABLE),
        ),
        **DELTA_SIZES,
        "torch_dtype": Written("float32"),
        "bos_token_id": Written(None),
        "eos_token_id": Written(None),
        "pad_token_id": Written(None),
        # There are no positions, and no layers for multi-token prediction.
        **dict.fromkeys(("rope_parameters", "rope_scaling", "rope_theta", "head_dim", "auto_map"), Field()),
        "num_nextn_predict_layers": Fixed(0),
    },
    constants={**LATENT, "position_embedding": "none", "tie_embeddings": False, **DEEPSEEK_V3.constants},
    unused=DEEPSEEK_V3.unused,
    tensors={
        **{name: stored for name, stored in LLAMA.tensors.items() if ".mlp." not in name and "self_attn" not in name},
        **MIXER_TENSORS,
        **{f"{EXPERTS}{name}_proj.weight": f"mlp.{name}.weight" for name in ("gate", "up", "down")},
        f"{EXPERTS}gate.weight": "mlp.router.gate.weight",
        f"{EXPERTS}gate.e_score_correction_bias": "mlp.router.bias",
        **{
            f"{EXPERTS}experts.{{e}}.{word}.weight": f"mlp.experts.{name}"
            for word, name in {"w1": "gate", "w3": "up", "w2": "down"}.items()
        },
        **shared_expert_tensors(f"{EXPERTS}shared_experts"),
    },
    # transformers saves dense layers under the name of experts; published files do not.
    other_tensors={name: stored for name, stored in LLAMA.tensors.items() if ".mlp." in name},
)

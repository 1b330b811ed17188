"""Ling 3: Kimi Delta Attention without latents in most layers, and latent attention with a gate of each head."""

from __future__ import annotations

from phalanx.spec.families.deepseek import DEEPSEEK_V3, LATENT, LatentRope
from phalanx.spec.families.family import (
    Family,
    Field,
    Fixed,
    OneOf,
    Read,
    SameAs,
    StoredTensors,
    Table,
    any_value,
)
from phalanx.spec.families.forms import (
    DENSE,
    SPARSE,
    LayerKind,
    LayerLists,
    LayerTypes,
    OfKind,
    every_nth_full,
    leading_dense,
)
from phalanx.spec.families.kimi_linear import KIMI_LINEAR, MIXER_TENSORS, has_delta
from phalanx.spec.families.llama import EXPERT_TENSORS, LLAMA, SHARED_EXPERT_TENSORS, query_heads
from phalanx.spec.layers import layer_specs
from phalanx.spec.model import ModelSpec
from phalanx.spec.parts.mixers import KimiDelta

DELTA = LayerKind("delta", has_delta, {"mixer.kind": "kimi_delta", "mixer.has_latents": False})
LATENT_ATTENTION = LayerKind("latent", lambda layer: not has_delta(layer))


class SafeGate(Field):
    """Switch of the lower bound of decays, which kda_lower_bound has."""

    dials = any_value(f"kinds.{DELTA.name}.mixer.decay_bound")
    other_names = ("kda_lower_bound",)

    def read(self, name: str, config: Table, dials: Table) -> Table:
        """Return the bound, if it is on."""
        bound = config.get("kda_lower_bound", -5.0) if config.get(name, True) else None
        return dict.fromkeys(self.dials, bound)

    def write(self, name: str, spec: ModelSpec) -> Table:
        """Return the switch, and the bound if there is one."""
        mixers = (layer.mixer for layer in layer_specs(spec) if isinstance(layer.mixer, KimiDelta))
        bound = next((mixer.decay_bound for mixer in mixers), None)
        return {name: bound is not None} | ({} if bound is None else {"kda_lower_bound": bound})


def mlp_types(config: Table, dials: Table) -> list[str]:
    """Return the type of each layer's MLP."""
    return leading_dense(config.get("first_k_dense_replace", 2), dials["num_layers"])


def renamed(name: str) -> str:
    """Return the name of a tensor of other families in this one."""
    return name.replace(".self_attn.", ".attention.").replace(".o_proj.", ".dense.")


LAYER_LISTS = LayerLists(
    {
        "layer_types": LayerTypes(
            {"linear_attention": DELTA, "full_attention": LATENT_ATTENTION},
            every_nth_full(6, "layer_group_size", other="linear_attention"),
            ("layer_group_size",),
        ),
        "mlp_layer_types": LayerTypes({"sparse": SPARSE, "dense": DENSE}, mlp_types, ("first_k_dense_replace",)),
    }
)
OTHER_FIELDS = (
    *("mla_use_nope", "moe_router_activation_func", "use_grouped_topk", "moe_layer_freq"),
    *("layer_types", "rope_parameters", "rope_scaling", "rope_theta", "auto_map"),
)
"""Fields of Kimi Linear that are others here."""
LATENTS = ("f_a_proj", "f_b_proj", "g_a_proj", "g_b_proj")
TENSORS: StoredTensors = {
    **{name: stored for name, stored in LLAMA.tensors.items() if "self_attn" not in name},
    **{name: stored for name, stored in MIXER_TENSORS.items() if not any(latent in name for latent in LATENTS)},
    "model.layers.{i}.self_attn.f_proj.weight": "attention.decay.weight",
    "model.layers.{i}.self_attn.g_proj.weight": OneOf("attention.output_gate.weight", "attention.wg.weight"),
    "model.layers.{i}.self_attn.A_log": "attention.A_log",
    **EXPERT_TENSORS,
    **SHARED_EXPERT_TENSORS,
    "model.layers.{i}.mlp.gate.expert_bias": "mlp.router.bias",
}

BAILING_HYBRID = Family(
    model_type="bailing_hybrid",
    architecture="BailingHybridForCausalLM",
    fields={name: field for name, field in KIMI_LINEAR.fields.items() if name not in OTHER_FIELDS}
    | {
        "vocab_size": Read("vocab_size", 157184),
        "hidden_size": Read("hidden_size", 2560),
        "num_hidden_layers": Read("num_layers", 42),
        "intermediate_size": Read("ffn_hidden_size", 6144),
        "model_max_length": Read("max_seq_len", 262144, other_names=("max_position_embeddings",)),
        "rms_norm_eps": Read("norm_eps", 1e-6),
        "moe_intermediate_size": Read("moe.expert_ffn_size", 768),
        "num_experts": Read("moe.num_experts", 512, other_names=("num_local_experts",)),
        "num_expert_group": Read("moe.num_groups", 8, other_names=("n_group",)),
        "topk_group": Read("moe.top_groups", 4),
        "routed_scaling_factor": Read("moe.routed_scale", 2.5),
        "rope_parameters": LatentRope(theta=6_000_000.0),
        # transformers replaces head_dim by the rotated width when it saves a model.
        "head_dim": OfKind(DELTA, Read("mixer.head_dim", 128, other_names=("linear_head_dim",))),
        "linear_head_dim": Field(),
        "linear_num_heads": OfKind(DELTA, Read("mixer.num_heads", None, unset=query_heads)),
        "short_conv_kernel_size": OfKind(DELTA, Read("mixer.kernel_size", 4, other_names=("linear_conv_kernel_dim",))),
        "linear_conv_kernel_dim": Field(),
        "kda_safe_gate": SafeGate(),
        "layer_types": LAYER_LISTS,
        # Layers for multi-token prediction are not read.
        **dict.fromkeys(("num_nextn_predict_layers", "num_mtp_layers", "mtp_loss_scaling_factor"), Field()),
        # Fields of published files, which transformers does not read.
        "no_kda_lora": Fixed(True),
        "gated_attention_proj_granularity_type": Fixed("head_wise"),
        "rope_interleave": Fixed(True),
        "score_function": Fixed("sigmoid"),
        "moe_router_enable_expert_bias": Fixed(True),
        "moe_shared_expert_intermediate_size": SameAs("moe.expert_ffn_size"),
        **dict.fromkeys(("use_bias", "use_qkv_bias"), Fixed(False)),
        **dict.fromkeys(("use_qk_norm", "auto_map"), Field()),
    },
    constants={**LATENT, "attention_gate": "head", "tie_embeddings": False, **DEEPSEEK_V3.constants},
    unused=DEEPSEEK_V3.unused,
    tensors={renamed(name): stored for name, stored in TENSORS.items() if "embed_tokens" not in name}
    | {"model.word_embeddings.weight": "embedding.weight"},
    ignored_tensors=(*LLAMA.ignored_tensors, "model.layers.{L}.*"),
)

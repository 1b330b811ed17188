"""Nemotron-H and Nemotron 3: a layer is one branch, of Mamba-2, attention, an MLP or experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.spec.families.family import Family, Field, Fixed, OneOf, Read, Table, Written, any_value
from phalanx.spec.families.forms import LayerKind, LayerTypes, OfKind
from phalanx.spec.families.llama import SIGMOID_ROUTER, query_heads
from phalanx.spec.families.mamba2 import mamba_kind, mamba_tensors
from phalanx.spec.model import ModelSpec

MAMBA = mamba_kind(branches="mixer")
ATTENTION = LayerKind("attention", lambda layer: layer.attends, {"branches": "mixer"})
EXPERTS = LayerKind("experts", lambda layer: layer.moe is not None, {"branches": "mlp"})
MLP = LayerKind("mlp", lambda layer: layer.branches == "mlp" and layer.moe is None, {"branches": "mlp"})
KINDS = {
    "linear_attention": MAMBA,
    "full_attention": ATTENTION,
    "moe": EXPERTS,
    "mlp": MLP,
    "mamba": MAMBA,
    "attention": ATTENTION,
}
LETTERS = {"M": "linear_attention", "*": "full_attention", "E": "moe", "-": "mlp"}


def words_of_pattern(config: Table, dials: Table) -> Sequence[str]:
    """Return the types of layers from hybrid_override_pattern, or by default."""
    return [LETTERS.get(letter, letter) for letter in config.get("hybrid_override_pattern") or "ME*-"]


@dataclass(frozen=True)
class BranchTypes(LayerTypes):
    """List of the types of layers, which also gives their number; without a layer of experts there are none."""

    dials = any_value("layers", "kinds", "num_layers")

    def read(self, name: str, config: Table, dials: Table) -> Table:
        """Return the kinds of layers."""
        words = config.get(name) or words_of_pattern(config, dials)
        layers = super().read(name, config, dials | {"num_layers": len(words)}) | {"num_layers": len(words)}
        has_experts = any(self.kinds[word] is EXPERTS for word in words)
        return layers | ({"kinds.mlp.moe": False} if has_experts else {"moe.num_experts": 0})

    def write(self, name: str, spec: ModelSpec) -> Table:
        """Return the list, and the pattern of older versions."""
        table = super().write(name, spec)
        letters = {word: letter for letter, word in LETTERS.items()}
        pattern = "".join(letters[word] for word in table[name])
        return table | {"hybrid_override_pattern": pattern, "num_hidden_layers": spec.num_layers}


HARMLESS = (
    *("expand", "hidden_dropout", "mamba_proj_bias", "mamba_ssm_cache_dtype", "moe_shared_expert_overlap"),
    *("mtp_hybrid_override_pattern", "mtp_layers_block_type", "num_logits_to_keep", "rescale_prenorm_residual"),
    *("residual_in_fp32", "sliding_window", "time_step_floor", "time_step_limit", "time_step_max", "time_step_rank"),
    *("use_mamba_kernels", "rope_theta", "partial_rotary_factor", "auto_map"),
)
"""Fields that transformers does not read, or that change initial weights, dropout and the choice of kernels only."""

NEMOTRON_H = Family(
    model_type="nemotron_h",
    architecture="NemotronHForCausalLM",
    fields={
        "vocab_size": Read("vocab_size", 131072),
        "hidden_size": Read("hidden_size", 4096),
        "num_attention_heads": Read("num_heads", 32),
        "num_key_value_heads": Read("num_kv_heads", 8, unset=query_heads),
        "head_dim": Read("head_dim", 128),
        "intermediate_size": Read("ffn_hidden_size", 21504),
        "max_position_embeddings": Read("max_seq_len", 4096),
        "layer_norm_epsilon": Read("norm_eps", 1e-5),
        "tie_word_embeddings": Written(False),  # transformers has two matrices whatever it says
        "mlp_hidden_act": Fixed("relu2"),
        "mamba_hidden_act": Fixed("silu"),
        "n_routed_experts": Read("moe.num_experts", 8, other_names=("num_local_experts",)),
        "num_experts_per_tok": Read("moe.top_k", 2),
        "moe_intermediate_size": Read("moe.expert_ffn_size", 7688),
        "n_shared_experts": Field(),
        "moe_shared_expert_intermediate_size": Read("moe.shared_ffn_size", 7688),
        "moe_latent_size": Read("moe.latent_size", None),
        "routed_scaling_factor": Read("moe.routed_scale", 1.0),
        "n_group": Read("moe.num_groups", 1),
        "topk_group": Read("moe.top_groups", 1),
        "norm_topk_prob": Read("moe.normalize_top_k", True),
        "layers_block_type": BranchTypes(
            KINDS, words_of_pattern, ("layer_types", "hybrid_override_pattern", "num_hidden_layers")
        ),
        "mamba_num_heads": OfKind(MAMBA, Read("mixer.num_heads", 128)),
        "mamba_head_dim": OfKind(MAMBA, Read("mixer.head_dim", 64)),
        "ssm_state_size": OfKind(MAMBA, Read("mixer.state_size", 128)),
        "n_groups": OfKind(MAMBA, Read("mixer.num_groups", 8, other_names=("mamba_n_groups",))),
        "conv_kernel": OfKind(MAMBA, Read("mixer.kernel_size", 4, other_names=("mamba_d_conv",))),
        "chunk_size": OfKind(MAMBA, Read("mixer.chunk_size", 128, other_names=("mamba_chunk_size",))),
        "use_conv_bias": OfKind(MAMBA, Read("mixer.convolution_bias", True, other_names=("mamba_conv_bias",))),
        "use_bias": OfKind(MAMBA, Read("mixer.bias", False)),
        "time_step_min": OfKind(MAMBA, Read("mixer.min_step", 0.001, other_names=("mamba_dt_min",))),
        # Layers for multi-token prediction, which are not trained, and not exported.
        "num_nextn_predict_layers": Written(0),
        "torch_dtype": Written("float32"),
        "bos_token_id": Written(None),
        "eos_token_id": Written(None),
        "pad_token_id": Written(None),
        **dict.fromkeys(HARMLESS, Field()),
    },
    constants={
        "activation": "relu2",
        "tie_embeddings": False,
        "position_embedding": "none",
        **SIGMOID_ROUTER,
        "moe.num_shared_experts": 1,
    },
    unused=("moe.balance_loss_coef", "moe.bias_update_rate"),
    has_optional_experts=True,
    tensors={
        "backbone.embeddings.weight": "embedding.weight",
        "backbone.norm_f.weight": "norm.weight",
        "lm_head.weight": "head.weight",
        "backbone.layers.{i}.norm.weight": OneOf("attention_norm.weight", "mlp_norm.weight"),
        **mamba_tensors("backbone.layers.{i}.mixer"),
        **{f"backbone.layers.{{i}}.mixer.{name}_proj.weight": f"attention.w{name}.weight" for name in "qkvo"},
        **{f"backbone.layers.{{i}}.mixer.{name}_proj.weight": f"mlp.{name}.weight" for name in ("up", "down")},
        "backbone.layers.{i}.mixer.gate.weight": "mlp.router.gate.weight",
        "backbone.layers.{i}.mixer.gate.e_score_correction_bias": "mlp.router.bias",
        "backbone.layers.{i}.mixer.experts.{e}.up_proj.weight": "mlp.experts.up",
        "backbone.layers.{i}.mixer.experts.{e}.down_proj.weight": "mlp.experts.down",
        "backbone.layers.{i}.mixer.fc1_latent_proj.weight": "mlp.latent_down.weight",
        "backbone.layers.{i}.mixer.fc2_latent_proj.weight": "mlp.latent_up.weight",
        "backbone.layers.{i}.mixer.shared_experts.up_proj.weight": "mlp.shared.up.weight",
        "backbone.layers.{i}.mixer.shared_experts.down_proj.weight": "mlp.shared.down.weight",
    },
    prefix="backbone.",
    ignored_tensors=("mtp.*",),
)

"""Falcon-H1: attention and Mamba-2 side by side in each layer, with factors of all products."""

from __future__ import annotations

from dataclasses import replace

from phalanx.spec.errors import UserError
from phalanx.spec.families.cohere import LogitScale
from phalanx.spec.families.family import Field, Fixed, Read, Table, any_value
from phalanx.spec.families.forms import score_factor
from phalanx.spec.families.llama import LLAMA, query_heads
from phalanx.spec.families.mamba2 import StepLimits, mamba_tensors
from phalanx.spec.model import ModelSpec

FACTORS: Table = {
    "attention_in_multiplier": 1.0,
    "key_multiplier": 1.0,
    "attention_out_multiplier": 1.0,
    "ssm_in_multiplier": 1.0,
    "ssm_multipliers": [1.0] * 5,
    "ssm_out_multiplier": 1.0,
    "mlp_multipliers": [1.0, 1.0],
}
"""Fields of the factors of inputs and outputs of products, with their defaults."""


class Multipliers(Field):
    """Factors of products. Products without a bias are linear, so those of inputs are factors of outputs."""

    dials = any_value("attention_scale", "value_scale", "gate_scale", "up_scale") | any_value(
        "side_mixer.scales", "side_mixer.output_scale"
    )
    other_names = tuple(FACTORS)

    def read(self, name: str, config: Table, dials: Table) -> Table:
        """Return the factors of scores and values, of both sides of the MLP, and of Mamba-2."""
        of = FACTORS | {field: config[field] for field in FACTORS if config.get(field) is not None}
        inputs = of["attention_in_multiplier"]
        of_scores = inputs**2 * of["key_multiplier"]
        gate, down = of["mlp_multipliers"]
        return {
            "attention_scale": None if of_scores == 1 else dials["head_dim"] ** -0.5 * of_scores,
            "value_scale": inputs * of["attention_out_multiplier"],
            "gate_scale": gate,
            "up_scale": down,
            "side_mixer.scales": [of["ssm_in_multiplier"] * factor for factor in of["ssm_multipliers"]],
            "side_mixer.output_scale": of["ssm_out_multiplier"],
        }

    def write(self, name: str, spec: ModelSpec) -> Table:
        """Return the factors, of which those of inputs are 1."""
        assert spec.side_mixer
        return FACTORS | {
            "key_multiplier": score_factor(spec),
            "attention_out_multiplier": spec.value_scale,
            "ssm_multipliers": list(spec.side_mixer.scales),
            "ssm_out_multiplier": spec.side_mixer.output_scale,
            "mlp_multipliers": [spec.gate_scale, spec.up_scale],
        }


class HeadWidth(Field):
    """Values of a head of Mamba-2, whose heads together have a width of their own."""

    dials = any_value("side_mixer.head_dim")
    other_names = ("mamba_d_ssm", "mamba_expand")

    def read(self, name: str, config: Table, dials: Table) -> Table:
        """Return the width. Raises UserError if it contradicts that of all heads."""
        heads = dials["side_mixer.num_heads"]
        width = config.get("mamba_d_ssm", 1024)
        width = config.get("mamba_expand", 2) * dials["hidden_size"] if width is None else width
        head_dim = config.get(name, "auto")
        head_dim = width // heads if head_dim == "auto" else head_dim
        if head_dim * heads != width:
            fix = f"use a model in which it is {width / heads:g}: mamba_d_ssm / mamba_n_heads"
            raise UserError(f"config.json {name}", head_dim, "is not supported", fix)
        return {"side_mixer.head_dim": head_dim}

    def write(self, name: str, spec: ModelSpec) -> Table:
        """Return the width of a head, and that of all heads."""
        assert spec.side_mixer
        return {name: spec.side_mixer.head_dim, "mamba_d_ssm": spec.side_mixer.num_heads * spec.side_mixer.head_dim}


class NormOrder(Field):
    """Order of Mamba-2's norm and gate: in released models, the norm follows the gate, if there is one."""

    def read(self, name: str, config: Table, dials: Table) -> Table:
        """Return no dials. Raises UserError for a norm before the gate."""
        if dials["side_mixer.has_norm"] and config.get(name, True):
            fix = "use a model in which it is false"
            raise UserError(f"config.json {name}", config.get(name), "is not supported", fix)
        return {}

    def write(self, name: str, spec: ModelSpec) -> Table:
        """Return that the gate comes first."""
        return {name: False}


LAYER = "model.layers.{i}."

FALCON_H1 = replace(
    LLAMA,
    model_type="falcon_h1",
    architecture="FalconH1ForCausalLM",
    fields=LLAMA.fields
    | {
        "vocab_size": Read("vocab_size", 128000),
        "num_key_value_heads": Read("num_kv_heads", 8, unset=query_heads),
        "intermediate_size": Read("ffn_hidden_size", 14336),
        "max_position_embeddings": Read("max_seq_len", 8192),
        "rms_norm_eps": Read("norm_eps", 1e-5),
        # transformers multiplies products after their biases.
        **dict.fromkeys(("attention_bias", "mlp_bias", "projectors_bias", "mamba_proj_bias"), Fixed(False)),
        "mamba_n_heads": Read("side_mixer.num_heads", 128),
        "mamba_d_head": HeadWidth(),
        "mamba_n_groups": Read("side_mixer.num_groups", 1),
        "mamba_d_state": Read("side_mixer.state_size", 256),
        "mamba_d_conv": Read("side_mixer.kernel_size", 4),
        "mamba_chunk_size": Read("side_mixer.chunk_size", 256),
        "mamba_conv_bias": Read("side_mixer.convolution_bias", True),
        "mamba_rms_norm": Read("side_mixer.has_norm", False),
        "mamba_norm_before_gate": NormOrder(),
        "time_step_limit": StepLimits("side_mixer"),
        "embedding_multiplier": Read("embedding_scale", 1.0),
        "lm_head_multiplier": LogitScale("logits_divisor", 1.0),
        "multipliers": Multipliers(),
        "num_logits_to_keep": Field(),
        # Fields of published files, which transformers does not read.
        "attn_layer_indices": Fixed(None),
        **dict.fromkeys(("mamba_use_mlp", "mlp_expansion_factor", "expansion_factor"), Field()),
    },
    constants={"qk_norm": "none", "side_mixer.kind": "mamba2"},
    tensors={
        name.replace(".mlp.", ".feed_forward.").replace("post_attention_layernorm", "pre_ff_layernorm"): stored
        for name, stored in LLAMA.tensors.items()
        if name != "model.norm.weight"
    }
    | {"model.final_layernorm.weight": "norm.weight"}
    | mamba_tensors(f"{LAYER}mamba", "side_mixer"),
)

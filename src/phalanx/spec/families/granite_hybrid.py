"""Granite 3 with experts, and Granite 4: Mamba-2 in most layers, and a shared MLP with experts or alone."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import cast

from phalanx.spec.errors import UserError
from phalanx.spec.families.family import Field, Fixed, OneOf, Read, Rows, StoredTensors, Table, any_value
from phalanx.spec.families.forms import LayerKind, LayerTypes, OfKind
from phalanx.spec.families.granite import GRANITE
from phalanx.spec.families.mamba2 import MAMBA_MIXER, StepLimits, mamba_kind, mamba_tensors
from phalanx.spec.layers import layer_specs
from phalanx.spec.model import ModelSpec
from phalanx.spec.parts.mixers import Mamba2

MAMBA = mamba_kind()
ATTENTION = LayerKind("full", lambda layer: layer.mixer is None)
EXPERT_TENSORS: StoredTensors = {
    "model.layers.{i}.block_sparse_moe.router.layer.weight": "mlp.router.gate.weight",
    "model.layers.{i}.block_sparse_moe.input_linear.weight": Rows("mlp.experts.gate", "mlp.experts.up", stacked=True),
    "model.layers.{i}.block_sparse_moe.output_linear.weight": Rows("mlp.experts.down", stacked=True),
}
NO_MLP = [name for name in GRANITE.tensors if ".mlp." in name]

GRANITE_MOE = replace(
    GRANITE,
    model_type="granitemoe",
    architecture="GraniteMoeForCausalLM",
    fields=GRANITE.fields
    | {
        "intermediate_size": Read("moe.expert_ffn_size", 11008),
        "num_local_experts": Read("moe.num_experts", 8),
        "num_experts_per_tok": Read("moe.top_k", 2),
        "router_aux_loss_coef": Read("moe.balance_loss_coef", 0.001),
        "mlp_bias": Fixed(False),
    },
    constants=GRANITE.constants | {"moe.normalize_top_k": True, "moe.z_loss_coef": 0.0},
    unused=("ffn_hidden_size",),
    tensors={name: stored for name, stored in GRANITE.tensors.items() if name not in NO_MLP} | EXPERT_TENSORS,
)


@dataclass(frozen=True)
class SharedWidth(Read):
    """Inner width of the shared MLP, which is the only one in a model without experts."""

    @property
    def dials(self) -> Mapping[str, Collection[object] | None]:
        """Dials of both MLPs."""
        return any_value(self.dial, "ffn_hidden_size") | {"moe.num_shared_experts": (1,)}

    def read(self, name: str, config: Table, dials: Table) -> Table:
        """Return the width, and that the shared MLP is one expert."""
        width = super().read(name, config, dials)
        return {**width, "ffn_hidden_size": width[self.dial], "moe.num_shared_experts": 1}

    def write(self, name: str, spec: ModelSpec) -> Table:
        """Return the width."""
        return {name: spec.moe.shared_width if spec.moe else spec.ffn_hidden_size}


class HeadWidth(Field):
    """Values of a head of Mamba-2, whose heads together have mamba_expand times the width of the model."""

    dials = any_value(f"{MAMBA_MIXER}.head_dim")
    other_names = ("mamba_expand",)

    def read(self, name: str, config: Table, dials: Table) -> Table:
        """Return the width, if some layers have such heads. Raises UserError if their sizes contradict each other."""
        if MAMBA.name not in dials.get("layers", ""):
            return {}
        heads = dials[f"{MAMBA_MIXER}.num_heads"]
        width = config.get("mamba_expand", 2) * dials["hidden_size"]
        head_dim = config.get(name, "auto")
        head_dim = width // heads if head_dim == "auto" else head_dim
        if heads * head_dim != width:
            fix = f"use a model in which it is {width / heads:g}: mamba_expand x hidden_size / mamba_n_heads"
            raise UserError(f"config.json {name}", head_dim, "is not supported", fix)
        return {f"{MAMBA_MIXER}.head_dim": head_dim}

    def write(self, name: str, spec: ModelSpec) -> Table:
        """Return the width of a head, and the factor, which is rounded."""
        layer = next(filter(MAMBA.includes, layer_specs(spec)), None)
        if layer is None:
            return {}
        mixer = cast(Mamba2, layer.mixer)
        return {name: mixer.head_dim, "mamba_expand": mixer.num_heads * mixer.head_dim // spec.hidden_size}


def all_mamba(config: Table, dials: Table) -> list[str]:
    """Return the types of layers by default."""
    return ["linear_attention"] * dials["num_layers"]


GRANITE_MOE_HYBRID = replace(
    GRANITE_MOE,
    model_type="granitemoehybrid",
    architecture="GraniteMoeHybridForCausalLM",
    fields=GRANITE_MOE.fields
    | {
        "shared_intermediate_size": SharedWidth("moe.shared_ffn_size", 1024),
        "position_embedding_type": Read(
            "position_embedding", None, words={None: "none", "nope": "none", "rope": "rope"}
        ),
        "layer_types": LayerTypes(
            {"linear_attention": MAMBA, "mamba": MAMBA, "full_attention": ATTENTION, "attention": ATTENTION},
            all_mamba,
        ),
        "mamba_n_heads": OfKind(MAMBA, Read("mixer.num_heads", 128)),
        "mamba_n_groups": OfKind(MAMBA, Read("mixer.num_groups", 1)),
        "mamba_d_state": OfKind(MAMBA, Read("mixer.state_size", 256)),
        "mamba_d_conv": OfKind(MAMBA, Read("mixer.kernel_size", 4)),
        "mamba_chunk_size": OfKind(MAMBA, Read("mixer.chunk_size", 256)),
        "mamba_conv_bias": OfKind(MAMBA, Read("mixer.convolution_bias", True)),
        "mamba_proj_bias": OfKind(MAMBA, Read("mixer.bias", False)),
        "mamba_d_head": HeadWidth(),  # after the types of layers
        "time_step_limit": StepLimits(),
    },
    has_optional_experts=True,
    unused=(),
    tensors=GRANITE_MOE.tensors
    | mamba_tensors("model.layers.{i}.mamba")
    | {
        "model.layers.{i}.shared_mlp.input_linear.weight": OneOf(
            Rows("mlp.shared.gate.weight", "mlp.shared.up.weight"), Rows("mlp.gate.weight", "mlp.up.weight")
        ),
        "model.layers.{i}.shared_mlp.output_linear.weight": OneOf("mlp.shared.down.weight", "mlp.down.weight"),
    },
)

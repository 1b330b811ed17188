"""OLMo Hybrid: Gated DeltaNet in three of four layers, and OLMo 3's attention, without positions in released models."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from phalanx.spec.families.family import Field, Read, Rows, Table
from phalanx.spec.families.forms import LayerTypes, OfKind, Rope, every_nth_full
from phalanx.spec.families.llama import query_heads
from phalanx.spec.families.olmo import OLMO2
from phalanx.spec.families.qwen3_next import ATTENTION
from phalanx.spec.families.qwen3_next import DELTA as DELTA_RULE
from phalanx.spec.model import ModelSpec

DELTA = replace(DELTA_RULE, dials={**DELTA_RULE.dials, "norm_position": "before", "mixer.norm_eps": 1e-5})
DELTA_MIXER = f"kinds.{DELTA.name}.mixer"


class OptionalRope(Rope):
    """Rotary embedding, or none if its theta is null."""

    @property
    def dials(self) -> Mapping[str, Collection[object] | None]:
        """Dials of `model.rope`, and whether there are positions."""
        return dict(super().dials) | {"position_embedding": ("rope", "none")}

    def read(self, name: str, config: Table, dials: Table) -> Table:
        """Return the dials of the embedding. A table without theta has that of the top level, or the default."""
        table = config.get("rope_scaling") or config.get(name) or {}
        theta = table.get("rope_theta", config.get("rope_theta", self.theta))
        return {"position_embedding": "none"} if theta is None else super().read(name, config, dials)

    def write(self, name: str, spec: ModelSpec) -> Table:
        """Return the embedding in the fields of all versions."""
        if spec.position_embedding == "rope":
            return super().write(name, spec)
        return {"rope_theta": None, "rope_scaling": None, name: {"rope_type": "default", "rope_theta": None}}


def layer_types(config: Table, dials: Table) -> Sequence[str]:
    """Return the type of each layer: every fourth has attention, or the last of fewer."""
    types = every_nth_full(4, other="linear_attention")(config, dials)
    return types if "full_attention" in types else [*types[:-1], "full_attention"]


def key_width(dials: Table) -> int:
    """Return the width of a key: all heads together have three quarters of the model's."""
    return int(0.75 * dials["hidden_size"] / dials[f"{DELTA_MIXER}.num_key_heads"])


def value_width(dials: Table) -> int:
    """Return the width of a value: that of two keys."""
    return 2 * int(dials[f"{DELTA_MIXER}.key_head_dim"])


LINEAR = "model.layers.{i}.linear_attn."
TAPS = ("query_taps", "key_taps", "value_taps")

OLMO_HYBRID = replace(
    OLMO2,
    model_type="olmo_hybrid",
    architecture="OlmoHybridForCausalLM",
    fields=OLMO2.fields
    | {
        "vocab_size": Read("vocab_size", 100352),
        "hidden_size": Read("hidden_size", 3840),
        "num_attention_heads": Read("num_heads", 30),
        "max_position_embeddings": Read("max_seq_len", 65536),
        "rms_norm_eps": Read("norm_eps", 1e-6),
        "rope_parameters": OptionalRope(),
        "linear_num_key_heads": OfKind(DELTA, Read("mixer.num_key_heads", None, unset=query_heads)),
        "linear_num_value_heads": OfKind(DELTA, Read("mixer.num_value_heads", None, unset=query_heads)),
        "linear_key_head_dim": OfKind(DELTA, Read("mixer.key_head_dim", None, unset=key_width)),
        "linear_value_head_dim": OfKind(DELTA, Read("mixer.value_head_dim", None, unset=value_width)),
        "linear_conv_kernel_dim": OfKind(DELTA, Read("mixer.kernel_size", 4)),
        "linear_allow_neg_eigval": OfKind(DELTA, Read("mixer.negative_eigenvalues", True)),
        "layer_types": LayerTypes({"linear_attention": DELTA, "full_attention": ATTENTION}, layer_types),
        # Distributions of initial weights.
        **dict.fromkeys((f"linear_{name}" for name in ("a_log_min", "a_log_max", "dt_min", "dt_max")), Field()),
        "linear_dt_init_floor": Field(),
    },
    tensors={
        **OLMO2.tensors,
        # transformers 5.24 saves all norms before MLPs under one name.
        "model.layers.{i}.post_attention_layernorm.weight": Rows(
            "attention_after.weight", alias="feedforward_layer_norm.weight"
        ),
        "model.layers.{i}.attention_layer_norm.weight": "attention_norm.weight",
        "model.layers.{i}.feedforward_layer_norm.weight": "mlp_norm.weight",
        **{
            f"{LINEAR}{name}_proj.weight": f"attention.{parameter}.weight"
            for name, parameter in zip(
                "qkvabgo", ("query", "key", "value", "decay", "update", "output_gate", "out"), strict=True
            )
        },
        # It also cuts the joined convolution in three equal parts, whatever the widths.
        **{f"{LINEAR}{taps[0]}_conv1d.weight": Rows(f"attention.{taps}", unit_axes=(1,), joined=TAPS) for taps in TAPS},
        f"{LINEAR}A_log": "attention.A_log",
        f"{LINEAR}dt_bias": "attention.dt_bias",
        f"{LINEAR}o_norm.weight": "attention.norm.weight",
    },
)

"""Granite 3."""

from __future__ import annotations

from dataclasses import replace

from phalanx.spec.families.family import Read, Table
from phalanx.spec.families.llama import LLAMA
from phalanx.spec.model import ModelSpec


class AttentionScale(Read):
    """Factor of attention's scores, which config.json always has."""

    def read(self, name: str, config: Table, dials: Table) -> Table:
        """Return the factor, unless it is that of other models, 1 / sqrt(head_dim)."""
        factor = super().read(name, config, dials)
        return {} if factor[self.dial] == dials["head_dim"] ** -0.5 else factor

    def write(self, name: str, spec: ModelSpec) -> Table:
        """Return the factor, also if it is that of other models."""
        return {name: spec.attention_scale or spec.head_dim**-0.5}


GRANITE = replace(
    LLAMA,
    model_type="granite",
    architecture="GraniteForCausalLM",
    fields=LLAMA.fields
    | {
        "embedding_multiplier": Read("embedding_scale", 1.0),
        "attention_multiplier": AttentionScale("attention_scale", 1.0),
        "residual_multiplier": Read("residual_scale", 1.0),
        "logits_scaling": Read("logits_divisor", 1.0),
    },
)

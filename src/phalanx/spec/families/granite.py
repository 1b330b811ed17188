"""Granite 3."""

from __future__ import annotations

from dataclasses import replace

from phalanx.spec.families.family import Read
from phalanx.spec.families.llama import LLAMA

GRANITE = replace(
    LLAMA,
    model_type="granite",
    architecture="GraniteForCausalLM",
    fields=LLAMA.fields
    | {
        "embedding_multiplier": Read("embedding_scale", 1.0),
        "attention_multiplier": Read("attention_scale", 1.0),
        "residual_multiplier": Read("residual_scale", 1.0),
        "logits_scaling": Read("logits_divisor", 1.0),
    },
)

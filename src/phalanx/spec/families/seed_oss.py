"""Seed-OSS."""

from __future__ import annotations

from dataclasses import dataclass, replace

from phalanx.spec.families.family import Field, Read, Table, any_value, require_supported
from phalanx.spec.families.llama import LLAMA, even_head_dim, query_heads
from phalanx.spec.model import ModelSpec

BIASES = {(False, False): "none", (True, False): "qkv", (True, True): "all"}
"""Biases of attention by attention_bias and attention_out_bias."""


@dataclass(frozen=True)
class AttentionBiases(Field):
    """Switches of the biases of queries, keys and values, and of the output."""

    other_names = ("attention_out_bias",)
    dials = any_value("attention_bias")

    def read(self, name: str, config: Table, dials: Table) -> Table:
        """Return the biases."""
        switches = (config.get(name, True), config.get("attention_out_bias", False))
        require_supported(f"{name}, attention_out_bias", switches, BIASES)
        return {"attention_bias": BIASES[switches]}

    def write(self, name: str, spec: ModelSpec) -> Table:
        """Return both switches."""
        switches = {biases: switches for switches, biases in BIASES.items()}[spec.attention_bias]
        return dict(zip((name, "attention_out_bias"), switches, strict=True))


SEED_OSS = replace(
    LLAMA,
    model_type="seed_oss",
    architecture="SeedOssForCausalLM",
    fields=LLAMA.fields
    | {
        "vocab_size": Read("vocab_size", 155136),
        "num_hidden_layers": Read("num_layers", 64),
        "num_attention_heads": Read("num_heads", 80),
        "num_key_value_heads": Read("num_kv_heads", 8, unset=query_heads),
        "head_dim": Read("head_dim", 128, unset=even_head_dim),
        "intermediate_size": Read("ffn_hidden_size", 27648),
        "max_position_embeddings": Read("max_seq_len", 524288),
        "attention_bias": AttentionBiases(),
        "residual_dropout": Field(),
    },
)

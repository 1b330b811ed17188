"""Ministral 3: queries have a factor that grows with their position."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from phalanx.spec.errors import UserError
from phalanx.spec.families.family import Read, Table, any_value
from phalanx.spec.families.forms import ROPE_FIELDS, Rope
from phalanx.spec.families.llama import LLAMA, even_head_dim, query_heads
from phalanx.spec.model import ModelSpec

DEFAULT_ROPE: Table = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


class RopeWithTemperature(Rope):
    """Rotary embedding, whose table has the scale of the factor of queries, and its interval as original context."""

    table_fields = ROPE_FIELDS | {"llama_4_scaling_beta", "max_position_embeddings"}

    @property
    def dials(self) -> Mapping[str, Collection[object] | None]:
        """Dials of `model.rope` and of the factor."""
        factor = any_value("query_temperature.scale", "query_temperature.interval")
        return {**super().dials, **factor}

    def read(self, name: str, config: Table, dials: Table) -> Table:
        """Return the dials of both."""
        rope = config.get("rope_scaling") or config.get(name) or self.absent
        read = super().read(name, config, dials)
        scale = rope.get("llama_4_scaling_beta")
        if scale is None or "rope.original_context" not in read:
            missing = "original_max_position_embeddings" if scale else "llama_4_scaling_beta"
            fix = "use the config.json of a complete model"
            raise UserError(f"config.json {name}.{missing}", None, "is missing", fix)
        factor = {"query_temperature.scale": scale, "query_temperature.interval": read["rope.original_context"]}
        return read | factor

    def write(self, name: str, spec: ModelSpec) -> Table:
        """Return the embedding with the scale of the factor."""
        assert spec.query_temperature
        tables = super().write(name, spec)
        scale = {"llama_4_scaling_beta": spec.query_temperature.scale}
        return tables | {key: tables[key] | scale for key in (name, "rope_scaling") if tables[key]}


MINISTRAL3 = replace(
    LLAMA,
    model_type="ministral3",
    architecture="Ministral3ForCausalLM",
    wrapper="mistral3",
    fields={key: field for key, field in LLAMA.fields.items() if key != "attention_bias"}
    | {
        "vocab_size": Read("vocab_size", 131072),
        "num_hidden_layers": Read("num_layers", 34),
        "num_key_value_heads": Read("num_kv_heads", 8, unset=query_heads),
        "head_dim": Read("head_dim", 128, unset=even_head_dim),
        "intermediate_size": Read("ffn_hidden_size", 14336),
        "max_position_embeddings": Read("max_seq_len", 262144),
        "rms_norm_eps": Read("norm_eps", 1e-5),
        "rope_parameters": RopeWithTemperature(theta=1_000_000.0, absent=DEFAULT_ROPE),
        "sliding_window": Read("sliding_window", None),
    },
)

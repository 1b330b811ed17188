"""Hunyuan, its dense models: norms of rotated queries and keys."""

from __future__ import annotations

from dataclasses import replace

from phalanx.spec.families.family import Field, Fixed, Read, Table
from phalanx.spec.families.forms import ROPE_FIELDS, Rope
from phalanx.spec.families.llama import LLAMA


class RopeWithAlpha(Rope):
    """Rotary embedding. Published files have the type dynamic, with a fixed alpha that stretches the base."""

    table_fields = ROPE_FIELDS | {"alpha"}

    def read_table(self, rope: Table, config: Table, dials: Table) -> Table:
        """Return the dials of a table. A base of theta x alpha^(K / (K - 2)) is one of another theta."""
        rope_type = rope.get("rope_type") or rope.get("type")
        if rope_type != "dynamic" or not rope.get("alpha"):
            return super().read_table(rope, config, dials)
        theta = rope.get("rope_theta") or config.get("rope_theta", self.theta)
        width = dials["head_dim"]
        return {"rope.theta": float(theta) * rope["alpha"] ** (width / (width - 2)), "rope.scaling": "none"}


HUNYUAN_DENSE = replace(
    LLAMA,
    model_type="hunyuan_v1_dense",
    architecture="HunYuanDenseV1ForCausalLM",
    fields=LLAMA.fields
    | {
        "vocab_size": Read("vocab_size", 290_943),
        "rms_norm_eps": Read("norm_eps", 1e-5),
        "rope_parameters": RopeWithAlpha(),
        "use_qk_norm": Fixed(True),
        "eod_token_id": Field(),
    },
    constants={"qk_norm": "rotated"},
    tensors=LLAMA.tensors
    | {
        "model.layers.{i}.self_attn.query_layernorm.weight": "attention.q_norm.weight",
        "model.layers.{i}.self_attn.key_layernorm.weight": "attention.k_norm.weight",
    },
)

"""Multi-head latent attention (MLA)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from phalanx.spec.activations import OUTPUT_GATES
from phalanx.spec.base import Spec
from phalanx.spec.errors import UserError
from phalanx.spec.parts.mixers.mixer import Mixer
from phalanx.spec.parts.operations import AttentionCore, Cut, GatherTokens, Parameter, Part, Value

if TYPE_CHECKING:
    from phalanx.spec.model import ModelSpec

LATENT_NORM_EPS = 1e-6
"""Added to the mean square of a latent, whatever the other norms add, as in the released code."""


class IndexerSpec(Spec):
    """The indexer of sparse attention, which chooses the keys that a query sees (DeepSeek-V3.2-Exp, section 2.1).

    Up to `top_k` tokens it chooses all of them, and attention is dense. Phalanx trains such sequences only. The tensors
    of the indexer are then loaded and saved with the model, and not trained."""

    num_heads: int = Field(gt=0, examples=[64])
    """Heads of its queries, which have one key together."""
    head_dim: int = Field(gt=0, examples=[128])
    """Width of a head."""
    top_k: int = Field(gt=0, examples=[2048])
    """Keys that a query sees at most."""
    rotates_neighbors: bool = False
    """Neighboring channels of its queries and keys are rotated together, not those of two halves (GLM-5)."""


class LatentAttention(Mixer):
    """Attention whose keys and values are products of a narrow latent, besides one rotated key of all heads.

    Source: DeepSeek-V2, arXiv 2405.04434, section 2.1."""

    attention_fields: ClassVar[frozenset[str]] = frozenset(
        {
            *("num_heads", "head_dim", "position_embedding", "rope", "query_temperature"),
            *("attention_bias", "attention_scale", "attention_gate"),
        }
    )
    attends: ClassVar[bool] = True
    kind: Literal["latent_attention"] = Field(examples=["latent_attention"])
    """Kind of the mixer."""
    latent_rank: int = Field(gt=0, examples=[512])
    """Width of the latent of keys and values."""
    query_rank: int | None = Field(None, gt=0, examples=[1536])
    """Width of the latent of queries; by default they are a product of the input."""
    rope_dim: int = Field(gt=0, examples=[64])
    """Channels of a head that are rotated, and have one key for all heads. The others of `head_dim` do not."""
    value_dim: int = Field(gt=0, examples=[128])
    """Width of a head's values."""
    indexer: IndexerSpec | None = Field(None, examples=[{"num_heads": 64, "head_dim": 128, "top_k": 2048}])
    """Indexer of sparse attention (DeepSeek-V3.2, GLM-5)."""

    @property
    def max_tokens(self) -> int | None:
        """Tokens up to which sparse attention is dense."""
        return self.indexer.top_k if self.indexer else None

    @property
    def rotary_width(self) -> int:
        """Number of a head's channels that are rotated."""
        return self.rope_dim

    def check(self, layer: ModelSpec) -> None:
        """Raise UserError if the widths of a head do not fit, or heads are grouped."""
        if layer.num_kv_heads != layer.num_heads:
            fix = "remove it: each head has keys and values of its own"
            raise UserError("num_kv_heads", layer.num_kv_heads, "is not supported with latent attention", fix)
        if self.rope_dim >= layer.head_dim or self.rope_dim % 2:
            problem = f"must be even, and less than head_dim ({layer.head_dim})"
            raise UserError("mixer.rope_dim", self.rope_dim, problem, "set head_dim to the width of queries and keys")
        if self.value_dim > layer.head_dim:
            problem = f"exceeds head_dim ({layer.head_dim}), the width of queries and keys"
            raise UserError("mixer.value_dim", self.value_dim, problem, "use a smaller value_dim")
        if self.indexer and not self.query_rank:
            problem = "requires the latent of queries, of which its queries are products"
            raise UserError("mixer.indexer", None, problem, "set mixer.query_rank")
        if layer.attention_gate == "channel":
            problem = "is not supported with latent attention"
            raise UserError("attention_gate", "channel", problem, 'use "head" or "none"')
        if layer.rope.fraction != 1:
            raise UserError("rope.fraction", layer.rope.fraction, "has no effect with mixer.rope_dim", "remove it")

    def describe(self, layer: ModelSpec, x: Value) -> Part:
        """Return the part: latents and their norms, heads as products of these, attention, and a product of its output.

        Each rank computes the latents. Values are padded to the width of keys in the kernel."""
        part = Part("attention", "attention", x)
        heads = Cut("model.num_heads", layer.num_heads, layer.head_dim)
        value_heads = replace(heads, unit=self.value_dim)
        has_bias = layer.attention_bias != "none"
        queries = x
        if self.query_rank:
            query_latent = part.linear("wq_a", x, width=self.query_rank, bias=has_bias)
            queries = part.norm("q_latent_norm", query_latent, self.query_rank, LATENT_NORM_EPS)
        latent = part.linear("wkv_a", x, width=self.latent_rank, bias=has_bias)
        rotated_key = part.linear("wk_rope", x, width=self.rope_dim, bias=has_bias)
        part.linear("wq_b" if self.query_rank else "wq", queries, heads)
        latent = part.norm("latent_norm", latent, self.latent_rank, LATENT_NORM_EPS)
        part.linear("wk_b", latent, replace(heads, unit=layer.head_dim - self.rope_dim))
        v = part.linear("wv_b", latent, value_heads)
        part.add(GatherTokens(reads=(rotated_key,), writes=replace(rotated_key, tokens="all")))
        out = Value(value_heads.width, value_heads)
        # Rotated queries, and keys with the rotated channels.
        q, k, padded_v, padded_out = (Value(heads.width, heads) for _ in range(4))
        operands = (q, k, v, out) if self.value_dim == layer.head_dim else (q, k, padded_v, padded_out)
        part.add(
            AttentionCore(
                reads=(q, k, v),
                writes=out,
                keeps=operands,
                backward_values=operands,
                heads=heads,
                flops_per_key=2 * (heads.width + value_heads.width),
            )
        )
        if layer.attention_gate != "none":
            out = part.gate_heads(OUTPUT_GATES[layer.attention_gate], x, out, heads)
        part.linear("wo", out, bias=layer.attention_bias == "all", init="output")
        if self.indexer and self.query_rank:
            num_heads = self.indexer.num_heads
            width = self.indexer.head_dim
            tensors = {
                "indexer_queries": Parameter((num_heads * width, self.query_rank)),
                "indexer_keys": Parameter((width, layer.hidden_size)),
                "indexer_key_norm": Parameter((width,), "ones"),
                "indexer_key_bias": Parameter((width,), "zeros"),
                # transformers keeps it in fp32 (`deepseek_v32:DeepseekV32PreTrainedModel`).
                "indexer_weights": Parameter((num_heads, layer.hidden_size), is_precise=True),
            }
            part.carried.update(tensors)
        return part

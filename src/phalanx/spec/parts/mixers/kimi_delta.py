"""Kimi Delta Attention (KDA): Gated DeltaNet with a decay of each channel."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from phalanx.spec.activations import GATED_OUTPUT
from phalanx.spec.parts.mixers.gated_delta import delta_rule
from phalanx.spec.parts.mixers.mixer import Mixer
from phalanx.spec.parts.operations import Cut, Parameter, Part, ScanFlops, Value

if TYPE_CHECKING:
    from phalanx.spec.model import ModelSpec


class KimiDelta(Mixer):
    """Gated DeltaNet in which each channel of a key has a decay, and the gate of the output is a sigmoid.

    Source: Kimi Linear, arXiv 2510.26692."""

    kind: Literal["kimi_delta"] = Field(examples=["kimi_delta"])
    """Kind of the mixer."""
    num_heads: int = Field(gt=0, examples=[32])
    """Heads, each with queries, keys, values and a state."""
    head_dim: int = Field(128, gt=0)
    """Width of a query, a key or a value."""
    kernel_size: int = Field(4, gt=0)
    """Tokens that the convolution sees, the current one included."""
    has_latents: bool = True
    """Decays and gates are products of latents, as wide as a head; false: of the input (Ling 3)."""
    decay_bound: float | None = Field(None, lt=0, examples=[-5.0])
    """Lower bound of the logarithm of a decay, which is then this number times the sigmoid of a step times its rate; by
    default it is a rate times the softplus of a step (Ling 3)."""

    def describe(self, layer: ModelSpec, x: Value) -> Part:
        """Return the part: latents and products, the rule on them, and a product of its normalized and gated output."""
        part = Part("attention", "attention", x)
        K = self.head_dim
        heads = Cut("model.mixer.num_heads", self.num_heads, K)
        q, k, v = (part.linear(name, x, heads) for name in ("query", "key", "value"))
        # Few columns, which float8 does not divide.
        b = part.linear("update", x, replace(heads, unit=1), is_precise=True)
        a, z = (
            part.linear(name, part.linear(f"{name}_latent", x, width=K) if self.has_latents else x, heads)
            for name in ("decay", "output_gate")
        )
        exact = replace(v, numbers="high")
        b_exact = replace(b, numbers="high")
        out = part.add(
            delta_rule(
                (q, k, v, a, b),
                self.kernel_size,
                step_bias=Parameter((heads.width,), "step_bias", is_precise=True, cut=heads),
                # Convolved heads, normalized ones and their gradients, of queries, keys and values. Gradients of the
                # output and of stored keys. Errors, what is written, and what queries and keys read. Decays to both
                # ends of a chunk, their logarithms, sums and gradients of these, and steps.
                segment_values=(exact,) * 21 + (b_exact,) * 6,
                # Gradients of what is written and of reads; decays of queries and keys, decayed ones, their gradients.
                chunk_values=(exact,) * 9,
                # Weights, overlaps, the inverse, and two gradients.
                pair_values=5,
                # Only pairs of an earlier and a later token are products of matrices.
                score_flops=ScanFlops(heads, per_token=-2 * K, per_pair=2 * K),
            )
        )
        out = part.norm("norm", out, K, layer.norm_eps)
        part.linear("out", part.activate(GATED_OUTPUT, z, out), init="output")
        return part

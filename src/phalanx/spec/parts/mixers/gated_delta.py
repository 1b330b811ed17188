"""Gated DeltaNet: a state that each token corrects."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from phalanx.spec.errors import UserError
from phalanx.spec.parts.mixers.mixer import Mixer
from phalanx.spec.parts.operations import Cut, Parameter, Part, ScanCore, ScanFlops, Value

if TYPE_CHECKING:
    from phalanx.spec.model import ModelSpec


class GatedDelta(Mixer):
    """A linear recurrence in which tokens replace the value that a state has under their key.

    Queries, keys and values are convolved first. A norm of each head and a gate follow. Source: Gated Delta Networks,
    arXiv 2412.06464, as in Qwen3-Next."""

    kind: Literal["gated_delta"] = Field(examples=["gated_delta"])
    """Kind of the mixer."""
    num_key_heads: int = Field(gt=0, examples=[16])
    """Heads of queries and keys."""
    num_value_heads: int = Field(gt=0, examples=[32])
    """Heads of values, each with a state; a multiple of the heads of keys."""
    key_head_dim: int = Field(128, gt=0)
    """Width of a query or a key."""
    value_head_dim: int = Field(128, gt=0)
    """Width of a value."""
    kernel_size: int = Field(4, gt=0)
    """Tokens that the convolution sees, the current one included."""
    negative_eigenvalues: bool = False
    """Updates of up to 2 in place of 1, so that a token may also reverse what the state has under its key (arXiv
    2411.12537)."""
    norm_eps: float | None = Field(None, gt=0, examples=[1e-5])
    """Added to the mean square of a head in its norm; by default `model.norm_eps`."""

    @model_validator(mode="after")
    def _check_heads(self) -> GatedDelta:
        if self.num_value_heads % self.num_key_heads:
            problem = f"is not a multiple of num_key_heads ({self.num_key_heads})"
            raise UserError("num_value_heads", self.num_value_heads, problem, "use a multiple")
        return self

    @property
    def value_heads_per_key(self) -> int:
        """Heads of values for each head of keys."""
        return self.num_value_heads // self.num_key_heads

    def describe(self, layer: ModelSpec, x: Value) -> Part:
        """Return the part: products, the rule on them, and a product of its normalized and gated output."""
        part = Part("attention", "attention", x)
        K = self.key_head_dim
        keys = Cut("model.mixer.num_key_heads", self.num_key_heads, K, copied_below=True)
        values = Cut("model.mixer.num_value_heads", self.num_value_heads, self.value_head_dim)
        heads = replace(values, unit=1)
        z = part.linear("output_gate", x, values)
        q, k = (part.linear(name, x, keys) for name in ("query", "key"))
        v = part.linear("value", x, values)
        # Decays and updates: few columns, which float8 does not divide.
        a, b = (part.linear(name, x, heads, is_precise=True) for name in ("decay", "update"))
        k_exact, v_exact, a_exact = (replace(value, numbers="high") for value in (k, v, a))
        lengths = Value(self.num_key_heads, replace(keys, unit=1), numbers="high")
        out = part.add(
            delta_rule(
                (q, k, v, a, b),
                self.kernel_size,
                step_bias=Parameter((self.num_value_heads,), "ones", is_precise=True),
                # Convolved heads, normalized ones and their gradients, of queries, keys and values. Of values also the
                # gradient of the output, errors, what is written, and what queries and keys read.
                segment_values=(k_exact,) * 6 + (v_exact,) * 8 + (a_exact,) * 10 + (lengths,) * 2,
                # Gradients of what is written, of errors, of keys, and of reads; these and queries and keys in another
                # order of dimensions.
                chunk_values=(v_exact,) * 6 + (k_exact,) * 3,
                # Decays, weights, overlaps, the inverse, and two gradients.
                pair_values=6,
                score_flops=ScanFlops(keys, per_pair=4 * K),
            )
        )
        out = part.norm("norm", out, self.value_head_dim, self.norm_eps or layer.norm_eps)
        part.linear("out", part.activate("swiglu", z, out), init="output")
        return part


def delta_rule(
    inputs: tuple[Value, Value, Value, Value, Value],
    kernel_size: int,
    *,
    step_bias: Parameter,
    segment_values: tuple[Value, ...],
    chunk_values: tuple[Value, ...],
    pair_values: int,
    score_flops: ScanFlops,
) -> ScanCore:
    """Return the kernel on queries, keys, values, decays and updates, of which the first three are convolved.

    `score_flops` are those of the scores of queries and keys; the others are those of reads of a state by both, their
    corrections, outputs, and updates of the state."""
    q, k, v, *_ = inputs
    keys = k.cut
    values = v.cut
    assert keys
    assert values
    state_size = keys.unit * values.unit
    state = replace(values, unit=state_size)
    return ScanCore(
        reads=inputs,
        writes=Value(values.width, values),
        keeps=inputs,
        heads=replace(values, unit=1),
        state=Value(state.width, state, numbers="high"),
        segment_values=segment_values,
        chunk_values=chunk_values,
        pair_values=pair_values,
        flops=(score_flops, ScanFlops(values, per_token=6 * state_size, per_pair=4 * values.unit)),
        parameters={
            "query_taps": Parameter((q.width, kernel_size), "taps", cut=keys),
            "key_taps": Parameter((k.width, kernel_size), "taps", cut=keys),
            "value_taps": Parameter((v.width, kernel_size), "taps"),
            "A_log": Parameter((values.units,), "log_rates", is_precise=True),
            "dt_bias": step_bias,
        },
    )

"""Mamba-2, a state space model."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from phalanx.spec.errors import UserError
from phalanx.spec.parts.mixers.mixer import Mixer
from phalanx.spec.parts.operations import Core, Cut, GatedNorm, Parameter, Part, ScanFlops, Value

if TYPE_CHECKING:
    from phalanx.spec.model import ModelSpec


class Mamba2(Mixer):
    """A recurrence whose state decays by a scalar of each head: linear attention with keys B, queries C and values x.

    Source: arXiv 2405.21060."""

    kind: Literal["mamba2"] = Field(examples=["mamba2"])
    """Kind of the mixer."""
    num_heads: int = Field(gt=0, examples=[64])
    """Heads (H)."""
    head_dim: int = Field(64, gt=0)
    """Values of a head (P)."""
    state_size: int = Field(128, gt=0)
    """Keys, and queries, of a head (N): its state has P x N numbers."""
    num_groups: int = Field(1, gt=0)
    """Groups of heads with equal keys and queries, and with a norm of their own (G)."""
    kernel_size: int = Field(4, gt=0)
    """Tokens that the convolution of values, keys and queries sees, the current one included."""
    chunk_size: int = Field(128, gt=0)
    """Tokens of a chunk, which is computed by products of matrices; states are kept from chunk to chunk only."""
    bias: bool = False
    """Biases of the products."""
    convolution_bias: bool = True
    """Biases of the convolution."""
    min_step: float = Field(0.0, ge=0)
    """Lower limit of the step by which a token changes the state."""
    max_step: float | None = Field(None, gt=0, examples=[0.1])
    """Upper limit of the step."""
    has_norm: bool = True
    """Norm of the gated output (in Falcon-H1 some models have none)."""
    scales: tuple[float, float, float, float, float] = Field((1.0,) * 5, strict=False)
    """Factors of the gate, values, keys, queries and steps before the convolution (Falcon-H1)."""
    output_scale: float = Field(1.0, gt=0)
    """Factor of what the last product reads (Falcon-H1)."""

    def check(self, layer: ModelSpec) -> None:
        """Raise UserError for sizes or limits that contradict each other."""
        if self.num_heads % self.num_groups:
            problem = f"does not divide mixer.num_heads ({self.num_heads})"
            raise UserError("mixer.num_groups", self.num_groups, problem, "use a divisor")
        if self.head_dim * self.state_size % self.chunk_size:
            size = f"head_dim x state_size ({self.head_dim * self.state_size})"
            problem = f"does not divide the numbers of a state, {size}"
            raise UserError("mixer.chunk_size", self.chunk_size, problem, "use a divisor, such as a power of two")
        if self.max_step is not None and self.max_step < self.min_step:
            problem = f"is below mixer.min_step ({self.min_step})"
            raise UserError("mixer.max_step", self.max_step, problem, "use a larger value")

    def describe(self, layer: ModelSpec, x: Value) -> Part:
        """Return the part: products, the recurrence after a convolution, a norm of its gated output, and a product.

        Ranks share groups with their heads. Ranks that share heads of the only group have copies of its keys."""
        part = Part("attention", "attention", x)
        heads = self.num_heads
        groups = self.num_groups
        shares_groups = groups > 1
        field = "model.mixer.num_groups" if shares_groups else "model.mixer.num_heads"
        units = groups if shares_groups else heads
        by_head = Cut(field, units, heads // units)
        channels = replace(by_head, unit=by_head.unit * self.head_dim)
        states = Cut("model.mixer.num_groups", groups, self.state_size, copied_below=not shares_groups)
        of_gate, of_values, of_keys, of_queries, of_steps = self.scales
        gate = part.linear("gate", x, channels, bias=self.bias, scale=of_gate)
        values = part.linear("values", x, channels, bias=self.bias, scale=of_values)
        keys = part.linear("keys", x, states, bias=self.bias, scale=of_keys)
        queries = part.linear("queries", x, states, bias=self.bias, scale=of_queries)
        # Steps: few columns, which float8 does not divide.
        steps = part.linear("steps", x, by_head, bias=self.bias, is_precise=True, scale=of_steps)
        out = self._append_scan(part, (values, keys, queries, steps))
        if not self.has_norm:
            part.linear("out", part.activate("swiglu", gate, out), bias=self.bias, init="output")
            return part
        width = channels.width // groups
        gated = GatedNorm(
            name="norm",
            reads=(out, gate),
            writes=replace(out),
            parameters={"weight": Parameter((channels.width,), "ones")},
            width=width,
            eps=layer.norm_eps,
        )
        normalized = part.add(gated)
        # Scaled: not the tensor that the norm has written.
        out = normalized if self.output_scale == 1 else replace(normalized)
        part.linear("out", out, bias=self.bias, init="output")
        return part

    def _append_scan(self, part: Part, inputs: tuple[Value, ...]) -> Value:
        """Append the recurrence with its convolutions, which keeps its inputs and the state before each chunk."""
        values, keys, _, steps = inputs
        assert values.cut
        assert keys.cut
        assert steps.cut
        parameters = {
            "log_rate": Parameter((self.num_heads,), "log_rates", is_precise=True),
            "skip": Parameter((self.num_heads,), "ones", is_precise=True),
            "step_bias": Parameter((self.num_heads,), "step_bias", is_precise=True),
        }
        for name, cut in (("value", values.cut), ("key", keys.cut), ("query", keys.cut)):
            parameters[f"{name}_taps"] = Parameter((cut.width, self.kernel_size), "taps", cut=cut)
            if self.convolution_bias:
                parameters[f"{name}_bias"] = Parameter((cut.width,), "zeros", cut=cut)
        size = self.head_dim * self.state_size
        exact_values, *exact = (replace(value, numbers="high") for value in inputs)
        of_heads = steps.cut.unit * (2 * self.chunk_size * self.head_dim + 4 * size)
        of_token = replace(steps.cut, unit=steps.cut.unit * size // self.chunk_size)
        out = Value(values.width, values.cut)
        return part.add(
            Core(
                reads=inputs,
                writes=out,
                keeps=(*inputs, Value(of_token.width, of_token, numbers="high")),
                heads=steps.cut,
                parameters=parameters,
                # Scores of queries and keys; the values that they weigh, and products with states.
                flops=(
                    ScanFlops(keys.cut, per_token=2 * self.chunk_size * self.state_size),
                    ScanFlops(steps.cut, per_token=of_heads),
                ),
                # The gradients of its output, of the convolutions' outputs and of steps; of a convolution's input, and
                # of a tap before its sum.
                backward_values=(out, *(exact_values,) * 3, *exact),
            )
        )

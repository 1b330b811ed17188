"""Gated short convolution."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from phalanx.spec.base import Spec
from phalanx.spec.parts.operations import Core, Cut, Parameter, Part, Value

if TYPE_CHECKING:
    from phalanx.spec.model import ModelSpec


class ShortConvolution(Spec):
    """A causal convolution of each channel, between a gate of its input and one of its output.

    Source: LFM2, arXiv 2511.23404."""

    kind: Literal["short_convolution"] = Field(examples=["short_convolution"])
    """Kind of the mixer."""
    kernel_size: int = Field(3, gt=0)
    """Tokens that the convolution sees, the current one included."""
    bias: bool = False
    """Biases of the convolution and of the products around it."""

    def describe(self, layer: ModelSpec, x: Value) -> Part:
        """Return the part: three products, the convolution of the gated values, and a product of its gated output."""
        part = Part("attention", "attention", x)
        channels = Cut("model.hidden_size", x.width)
        inputs = tuple(
            part.linear(name, x, channels, bias=self.bias) for name in ("input_gate", "output_gate", "values")
        )
        parameters = {"taps": Parameter((x.width, self.kernel_size), "taps")}
        if self.bias:
            parameters["bias"] = Parameter((x.width,), "zeros")
        out = Value(x.width, channels)
        # The gradients of the output and of a gate, gated values, the gradients of the convolution's output and input,
        # and of a tap before its sum.
        exact = replace(out, numbers="high")
        part.add(
            Core(
                reads=inputs,
                writes=out,
                keeps=inputs,
                heads=channels,
                backward_values=(out, out, *(exact,) * 4),
                parameters=parameters,
            )
        )
        part.linear("out", out, bias=self.bias, init="output")
        return part

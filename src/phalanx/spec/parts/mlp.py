"""The dense network of a block: products with an inner width, an activation, and a product back."""

from __future__ import annotations

from phalanx.spec.activations import NUM_INPUTS
from phalanx.spec.model import ModelSpec
from phalanx.spec.parts.operations import Cut, Part, Value


def describe_mlp(spec: ModelSpec, x: Value, name: str = "mlp") -> Part:
    """Return the MLP of a dense layer, or of a branch of that name."""
    part = Part(name, "mlp", x)
    append_mlp(part, spec, x, Cut("model.ffn_hidden_size", spec.ffn_hidden_size), bias=spec.bias)
    return part


def append_mlp(part: Part, spec: ModelSpec, x: Value, inner: Cut, *, bias: bool = False, prefix: str = "") -> Value:
    """Append the products of an MLP of an inner width; return its output."""
    inputs = [part.linear(f"{prefix}{name}", x, inner, bias=bias) for name in input_names(spec.activation)]
    activated = part.activate(spec.activation, *inputs, arguments=spec.activation_arguments)
    return part.linear(f"{prefix}down", activated, bias=bias, init="output")


def input_names(activation: str) -> tuple[str, ...]:
    """Return the names of the products that an activation reads."""
    return ("gate", "up")[-NUM_INPUTS[activation] :]

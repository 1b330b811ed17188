"""The dense network of a block: products with an inner width, an activation, and a product back."""

from __future__ import annotations

from collections.abc import Mapping

from phalanx.spec.activations import NUM_INPUTS
from phalanx.spec.model import ModelSpec
from phalanx.spec.parts.operations import Cut, Part, Value

NO_SCALES: Mapping[str, float] = {}


def describe_mlp(spec: ModelSpec, x: Value, name: str = "mlp") -> Part:
    """Return the MLP of a dense layer, or of a branch of that name."""
    part = Part(name, "mlp", x)
    inner = Cut("model.ffn_hidden_size", spec.ffn_hidden_size)
    scales = {"gate": spec.gate_scale, "up": spec.up_scale}
    append_mlp(part, spec, x, inner, limit=spec.silu_limit, bias=spec.bias, scales=scales)
    return part


def append_mlp(
    part: Part,
    spec: ModelSpec,
    x: Value,
    inner: Cut,
    *,
    limit: float | None,
    bias: bool = False,
    prefix: str = "",
    scales: Mapping[str, float] = NO_SCALES,
) -> Value:
    """Append the products of an MLP of an inner width, whose activation may have a limit; return its output.

    `scales` are factors of the first products."""
    inputs = [
        part.linear(f"{prefix}{name}", x, inner, bias=bias, scale=scales.get(name, 1.0))
        for name in input_names(spec.activation)
    ]
    activated = part.activate(spec.activation_with(limit), *inputs)
    return part.linear(f"{prefix}down", activated, bias=bias, init="output")


def input_names(activation: str) -> tuple[str, ...]:
    """Return the names of the products that an activation reads."""
    return ("gate", "up")[-NUM_INPUTS[activation] :]

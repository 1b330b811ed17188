"""Inputs of layers besides the residual stream (per-layer embeddings of Gemma 3n and Gemma 4 E2B).

Each layer has a vector of width P for a token: a row of a second embedding, plus a norm of a product of the first one.
Ranks share the second embedding by vocabulary, as the first one. The products are small, and every tensor-parallel rank
has all of them, for its tokens of the residual stream.

Why: `docs/design/decisions/given-tensors.md`."""

from __future__ import annotations

from dataclasses import replace

from phalanx.spec.model import ModelSpec
from phalanx.spec.parts.mlp import input_names
from phalanx.spec.parts.operations import LayerInputs, LookUp, Parameter, Part, Value

NAME = "per_layer_inputs"


def describe_per_layer_inputs(spec: ModelSpec, x: Value) -> Part:
    """Return the inputs of all layers, one after another, from the output of the embedding."""
    size = spec.per_layer_input_size
    assert size
    part = Part(NAME, "inputs", x)
    width = spec.num_layers * size
    table = Parameter((spec.vocab_size, width))
    rows = replace(x, width=width)
    rows = part.add(LookUp(name="embedding", reads=(), writes=rows, parameters={"weight": table}))
    projected = part.linear("projection", x, width=width, is_precise=True)
    normalized = part.norm("norm", projected, size, spec.norm_eps, bool(spec.norm_offset))
    part.add(LayerInputs(reads=(normalized, rows), writes=replace(normalized)))
    return part


def describe_per_layer_branch(layer: ModelSpec, x: Value) -> Part:
    """Return the branch of a layer: an MLP of width P, in which the layer's input takes the place of a product."""
    size = layer.per_layer_input_size
    assert size
    part = Part("per_layer", "mlp", x)
    gate = part.linear(input_names(layer.activation)[0], x, width=size, is_precise=True)
    given = replace(gate, is_given=True)
    activated = part.activate(layer.activation_with(None), gate, given)
    part.linear("down", activated, width=x.width, init="output", is_precise=True)
    return part

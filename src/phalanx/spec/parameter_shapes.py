"""Names and shapes of all parameters of `phalanx.model.transformer`, without torch."""

from __future__ import annotations

import math
from functools import cache

from phalanx.spec.model import ModelSpec
from phalanx.spec.parts.model import model_parameters
from phalanx.spec.parts.operations import Shape

Shapes = dict[str, Shape]


def parameter_shapes(spec: ModelSpec) -> Shapes:
    """Return shapes by name, in the order of the transformer's `named_parameters`."""
    return {name: parameter.shape for name, parameter in model_parameters(spec).items()}


def trained_shapes(spec: ModelSpec) -> Shapes:
    """Return the shapes of the parameters that a run does not freeze."""
    return {name: parameter.shape for name, parameter in model_parameters(spec).items() if not parameter.is_frozen}


@cache
def strip_block_index(name: str) -> str:
    """Return a name without its block index: "blocks.3.mlp.up.weight" becomes "blocks.mlp.up.weight"."""
    part, _, rest = name.partition(".")
    return f"{part}.{rest.partition('.')[2]}" if part == "blocks" else name


def num_elements(shape: Shape) -> int:
    """Return the number of elements of a tensor of this shape."""
    return math.prod(shape)


def is_muon_parameter(name: str, shape: Shape) -> bool:
    """Return whether Muon trains a tensor: matrices inside blocks, and stacks of them, but no taps, norms or biases.

    AdamW trains the rest (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/).
    """
    return name.startswith("blocks.") and len(shape) >= 2 and not name.endswith(("taps", "norm.weight", "bias"))


def has_weight_decay(name: str, shape: Shape) -> bool:
    """Return whether a tensor has weight decay: matrices, and stacks of them, but not those of norms or biases."""
    return len(shape) >= 2 and not name.endswith(("norm.weight", "bias"))

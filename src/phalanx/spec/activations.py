"""Activations by the names in run files. Their kernels are in `model/products.py` under the same names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

NUM_INPUTS = {"swiglu": 2, "geglu_tanh": 2, "clamped_swiglu": 2, "gelu": 1, "gelu_tanh": 1, "relu2": 1}
"""Number of products that an activation reads: 2 if one of them is its gate."""
GATED_OUTPUT = "glu"
"""Activation of a mixer's output: times the sigmoid of a gate (GLU, arXiv 1612.08083)."""

# Run files accept the names of the table; mypy, which reads no tables, takes any text.
if TYPE_CHECKING:
    ActivationName: TypeAlias = str
else:
    ActivationName = Literal[tuple(NUM_INPUTS)]

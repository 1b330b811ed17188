"""Activations by the names in run files. Their kernels are in `model/products.py` under the same names."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, TypeAlias

NUM_INPUTS = {"swiglu": 2, "geglu_tanh": 2, "clamped_swiglu": 2, "gelu": 1, "gelu_tanh": 1, "relu2": 1, "xielu": 1}
"""Number of products that an activation reads: 2 if one of them is its gate."""
XIELU_PARAMETERS = {"alpha_p": math.log(math.expm1(0.8)), "alpha_n": math.log(math.expm1(0.3))}
"""Trained numbers of xIELU and their initial values: both slopes are 0.8 (arXiv 2411.13010)."""
GATED_OUTPUT = "glu"
"""Activation of a mixer's output: times the sigmoid of a gate (GLU, arXiv 1612.08083)."""
OUTPUT_GATES = {"channel": GATED_OUTPUT, "head": "head_glu", "head_softplus": "head_softplus"}
"""Activations of attention's output, by the names of gates in run files."""

# Run files accept the names of the table; mypy, which reads no tables, takes any text.
if TYPE_CHECKING:
    ActivationName: TypeAlias = str
else:
    ActivationName = Literal[tuple(NUM_INPUTS)]

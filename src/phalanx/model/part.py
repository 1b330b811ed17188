"""Modules whose parameters are those that a part of a block declares (`spec.parts`).

Layouts replace the products of a module and the readings of its input, by the roles that the declaration gives them,
without knowing the part.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.model.norm import RMSNorm
from phalanx.model.products import ProductLinear, TensorTuple
from phalanx.spec.parts.operations import Linear, Norm, Part

Multiply = Callable[..., TensorTuple]
"""Function of a tensor and the layers that read it; returns their outputs."""
Reader = Callable[[Tensor], Any]


def multiply_each(x: Tensor, *layers: nn.Module) -> TensorTuple:
    """Return the output of each layer."""
    return tuple(layer(x) for layer in layers)


def read_input(reader: Reader, x: Tensor) -> Any:
    """Return the result of the first operations of a module, which read its input."""
    return reader(x)


class PartModule(nn.Module):
    """Module of a part, with the declared parameters."""

    def __init__(self, part: Part, norm_eps: float = 0.0) -> None:
        super().__init__()
        self.part = part
        self.multiply_columns: Multiply = multiply_each
        """The column-parallel products of one input."""
        self.read_input: Callable[[Reader, Tensor], Any] = read_input
        for operation in part.operations:
            if isinstance(operation, Linear) and operation.name:
                (rows, columns) = operation.matrix.shape
                self.add_module(operation.name, ProductLinear(columns, rows, "bias" in operation.parameters))
            elif isinstance(operation, Norm):
                self.add_module(operation.name, RMSNorm(operation.width, norm_eps))
            else:
                for name, parameter in operation.parameters.items():
                    self.register_parameter(name, nn.Parameter(torch.empty(parameter.shape)))

    def project(self, x: Tensor, *names: str) -> TensorTuple:
        """Return the column-parallel products of `x` with some layers."""
        # Looked up at every call: wrappers of the layers (ZeRO-3, recomputation) may replace them.
        return self.multiply_columns(x, *(getattr(self, name) for name in names))

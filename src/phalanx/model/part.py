"""Modules whose parameters are those that a part of a block declares (`spec.parts`).

Layouts replace the products of a module and the readings of its input, by the roles that the declaration gives them,
without knowing the part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.model.dropout import Dropout
from phalanx.model.embedding import Embedding
from phalanx.model.norm import identity, make_norm
from phalanx.model.products import Adapter, Magnitudes, ProductLinear, TensorTuple
from phalanx.model.sequence_context import SequenceContext
from phalanx.spec.parts.operations import GroupedLinear, Linear, LookUp, Magnitude, Norm, Operation, Parameter, Part

Multiply = Callable[..., TensorTuple]
"""Function of a tensor and the layers that read it; returns their outputs."""
Reader = Callable[[Tensor], Any]
Kernel = Callable[..., Tensor]
"""Function of values [B, T, H, K] and a mask, with parameters of the heads [H, ...] by name; returns [B, T, H, K]."""


def multiply_each(x: Tensor, *layers: nn.Module) -> TensorTuple:
    """Return the output of each layer."""
    return tuple(layer(x) for layer in layers)


def read_input(reader: Reader, x: Tensor) -> Any:
    """Return the result of the first operations of a module, which read its input."""
    return reader(x)


def modules_declaring(model: nn.Module, kind: type[Operation]) -> Iterator[Any]:
    """Yield the modules of a model whose own operations include one of a kind."""
    for module in model.modules():
        if isinstance(module, PartModule) and any(isinstance(each, kind) for each in module.part.operations):
            yield module


def empty_parameter(parameter: Parameter) -> nn.Parameter:
    """Return a parameter as it is stored: a quantized one in bytes."""
    if not parameter.is_quantized:
        return nn.Parameter(torch.empty(parameter.shape))
    return nn.Parameter(torch.empty(parameter.stored_shape, dtype=torch.uint8), requires_grad=False)


class PartModule(nn.Module):
    """Module of a part, with the declared parameters."""

    multiply_columns: Multiply
    """The column-parallel products of one input, which layouts may replace."""
    read_input: Callable[[Reader, Tensor], Any]
    """Application of the first operations, which recomputation of norms may wrap."""
    gather_tokens: Callable[[Tensor], Tensor]
    """Function of a value of this rank's tokens that returns that of all tokens, which layouts may replace."""
    core: Kernel
    """The kernel of a mixer, in which tokens see each other, which layouts may wrap or replace."""
    sequence_inputs: Callable[[SequenceContext], tuple[Any, ...]]
    """Function of a mixer that returns its further arguments: what it needs of a micro-batch's sequences."""

    def __init__(self, part: Part) -> None:
        super().__init__()
        self.declare(part)
        for operation in part.modules:
            if isinstance(operation, Linear) and operation.name:
                (rows, columns) = operation.matrix.shape
                layer = ProductLinear(columns, rows, "bias" in operation.parameters)
                if operation.matrix.is_quantized:
                    layer.weight = empty_parameter(operation.matrix)
                self.add_module(operation.name, layer)
            elif isinstance(operation, Norm):
                self.add_module(operation.name, make_norm(operation))
            elif isinstance(operation, Magnitude):
                self.add_module(operation.name, Magnitudes(*operation.parameters["weight"].shape))
            elif isinstance(operation, LookUp) and operation.name:
                self.add_module(operation.name, Embedding(*operation.parameters["weight"].shape))
            else:
                for name, parameter in operation.parameters.items():
                    self.register_parameter(name, empty_parameter(parameter))
        for name, adapter in part.adapters.items():
            if isinstance(adapter[0], GroupedLinear):
                continue
            a, b = (getattr(self, linear.name) for linear in adapter)
            magnitudes = getattr(self, part.magnitudes[name].name) if name in part.magnitudes else None
            dropout = Dropout(adapter[0].dropout) if adapter[0].dropout else None
            getattr(self, name).adapter = Adapter(a, b, adapter[0].scale, magnitudes, dropout)
        for name, tensor in part.carried.items():
            self.register_buffer(name, torch.empty(tensor.shape))

    def declare(self, part: Part) -> None:
        """Set the declaration, and what layouts may replace."""
        self.part = part
        self.scales = {linear.name: linear.scale for linear in part.linears if linear.scale != 1 and not linear.adapts}
        self.multiply_columns = multiply_each
        self.read_input = read_input
        self.gather_tokens = identity

    def project(self, x: Tensor, *names: str) -> TensorTuple:
        """Return the column-parallel products of `x` with some layers, times their factors."""
        # Looked up at every call: wrappers of the layers (ZeRO-3, recomputation) may replace them.
        outputs = self.multiply_columns(x, *(getattr(self, name) for name in names))
        if not self.scales:
            return outputs
        factors = map(self.scales.get, names)
        return tuple(y if factor is None else y * factor for y, factor in zip(outputs, factors, strict=True))

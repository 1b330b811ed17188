"""Weights of a part's products on a rank."""

from __future__ import annotations

from collections.abc import Iterable

from phalanx.cost.exact.forward_shape import ForwardShape
from phalanx.spec.parts.operations import GroupedLinear, Linear, Part


def matrix_numbers(linear: Linear, shape: ForwardShape) -> int:
    """Return the numbers of a product's matrix on a rank, or of its matrices of all local experts."""
    (x,) = linear.reads
    numbers = shape.width(x) * shape.width(linear.writes)
    if isinstance(linear, GroupedLinear):
        numbers *= linear.matrix.shape[0] // shape.layout.ep
    return numbers


def dequantized_bytes(linears: Iterable[Linear], shape: ForwardShape) -> int:
    """Return the bytes of the largest matrix that one of some products computes from a quantized one; else 0."""
    sizes = (matrix_numbers(linear, shape) for linear in linears if linear.matrix.is_quantized)
    return shape.compute_bytes * max(sizes, default=0)


def gradient_numbers(linear: Linear, shape: ForwardShape) -> int:
    """Return the numbers of the gradient of a product's matrix on a rank; 0 if it is frozen."""
    return matrix_numbers(linear, shape) if linear.is_trained else 0


def part_gradients(part: Part, shape: ForwardShape) -> int:
    """Return the numbers of the gradients of all matrices of a part on a rank."""
    return sum(gradient_numbers(linear, shape) for linear in part.linears)


def expert_gradients(part: Part, shape: ForwardShape) -> int:
    """Return the numbers of the gradients of the matrices of the routed experts on a rank."""
    return sum(gradient_numbers(linear, shape) for linear in part.linears if isinstance(linear, GroupedLinear))

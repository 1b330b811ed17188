"""Weights of a part's products on a rank."""

from __future__ import annotations

from phalanx.cost.exact.forward_shape import ForwardShape
from phalanx.spec.parts.operations import GroupedLinear, Linear, Part


def matrix_numbers(linear: Linear, shape: ForwardShape) -> int:
    """Return the numbers of a product's matrix on a rank, or of its matrices of all local experts."""
    (x,) = linear.reads
    numbers = shape.width(x) * shape.width(linear.writes)
    if isinstance(linear, GroupedLinear):
        numbers *= linear.matrix.shape[0] // shape.layout.ep
    return numbers


def gradient_numbers(linear: Linear, shape: ForwardShape) -> int:
    """Return the numbers of the gradient of a product's matrix on a rank; 0 if it is frozen."""
    return matrix_numbers(linear, shape) if linear.is_trained else 0


def part_gradients(part: Part, shape: ForwardShape) -> int:
    """Return the numbers of the gradients of all matrices of a part on a rank."""
    return sum(gradient_numbers(linear, shape) for linear in part.linears)


def expert_gradients(part: Part, shape: ForwardShape) -> int:
    """Return the numbers of the gradients of the matrices of the routed experts on a rank."""
    return sum(gradient_numbers(linear, shape) for linear in part.linears if isinstance(linear, GroupedLinear))

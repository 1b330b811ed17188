"""Floating-point operations of a part's forward pass."""

from __future__ import annotations

from phalanx.spec.layout import Layout
from phalanx.spec.parts.operations import Core, GroupedLinear, Linear, Part


def product_flops(part: Part) -> float:
    """Return the FLOPs of the products on one token: 2 per weight that it uses (arXiv 2001.08361, section 2.1)."""
    return sum(2.0 * linear.matrix.numbers * _used_share(linear) for linear in part.linears)


def _used_share(linear: Linear) -> float:
    """Return the share of a product's weights that a token uses: top_k of the experts."""
    return linear.reads[0].copies / linear.matrix.shape[0] if isinstance(linear, GroupedLinear) else 1.0


def core_flops_per_key(part: Part) -> int:
    """Return the FLOPs of attention for a query and a key that it sees."""
    return sum(operation.flops_per_key for operation in part.operations if isinstance(operation, Core))


def tokens_through(linear: Linear, layout: Layout, tokens: float) -> float:
    """Return the number of a rank's tokens that a product multiplies; those of all experts together.

    Args:
        linear: Product of a part that is declared for the layout.
        tokens: Tokens of the tensor-parallel ranks together.
    """
    (x,) = linear.reads
    has_own_tokens = layout.sequence_parallel and x.tokens == "residual" and linear.role == "copied"
    return x.copies * (tokens / layout.tp if has_own_tokens else tokens)

"""Floating-point operations of a part's forward pass."""

from __future__ import annotations

from phalanx.spec.layout import Layout
from phalanx.spec.parts.attended_keys import attended_keys
from phalanx.spec.parts.operations import GroupedLinear, Linear, Part
from phalanx.spec.parts.scan_segments import mean_chunk


def product_flops(part: Part) -> float:
    """Return the FLOPs of the products on one token: 2 per weight that it uses (arXiv 2001.08361, section 2.1)."""
    return sum(map(linear_flops, part.linears))


def backward_product_flops(part: Part) -> float:
    """Return the FLOPs of the products' gradients on one token: of inputs, and of the weights that are trained."""
    return sum(linear_flops(linear) * (1 + linear.is_trained) for linear in part.linears)


def linear_flops(linear: Linear) -> float:
    """Return the FLOPs of a product on one token, which uses the weights of top_k of the experts, if there are any."""
    used_share = linear.reads[0].copies / linear.matrix.shape[0] if isinstance(linear, GroupedLinear) else 1.0
    return 2.0 * linear.matrix.numbers * used_share


def core_flops(part: Part, seq_len: int, causal: bool = True) -> float:
    """Return the FLOPs of attention, or of a scan, on a token.

    Args:
        part: Part with a kernel, or without.
        seq_len: T, tokens of a sequence.
        causal: Count the keys before each query only.
    """
    pairs = sum(
        core.flops_per_key * attended_keys(core.window, seq_len, causal, core.chunk) for core in part.attention_cores
    )
    return pairs + _scan_flops(part, seq_len)


def kernel_flops(part: Part, seq_len: int, ranks: int, ulysses: int) -> float:
    """Return the FLOPs that a kernel computes on a token, of the tensor-parallel rank with most heads.

    They include those of padding, and only keys before each query. `ulysses` ranks exchange tokens for heads, with
    copies of heads that are fewer."""
    pairs = sum(
        (core.flops_per_key + 2 * core.padding)
        / core.heads.units
        * core.heads.units_on_rank(ranks)
        * attended_keys(core.window, seq_len, chunk=core.chunk)
        for core in part.attention_cores
    )
    return pairs + _scan_flops(part, seq_len, ranks, ulysses)


def _scan_flops(part: Part, seq_len: int, ranks: int = 1, ulysses: int = 1) -> float:
    """Return the FLOPs of a scan on a token."""
    return sum(
        max(flops.heads.units_on_rank(ranks), ulysses) * (flops.per_token + flops.per_pair * mean_chunk(seq_len))
        for core in part.cores
        for flops in core.flops
    )


def tokens_through(linear: Linear, layout: Layout, tokens: float) -> float:
    """Return the number of a rank's tokens that a product multiplies; those of all experts together.

    Args:
        linear: Product of a part that is declared for the layout.
        tokens: Tokens of the tensor-parallel ranks together.
    """
    (x,) = linear.reads
    has_own_tokens = layout.sequence_parallel and x.tokens == "residual" and linear.role == "copied"
    return x.copies * (tokens / layout.tp if has_own_tokens else tokens)

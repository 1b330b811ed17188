"""How many floating-point operations a token costs, and what share of the hardware's peak a run reaches."""

from __future__ import annotations

from phalanx.cost.parameters import parameters
from phalanx.spec.model import ModelSpec


def training_flops_per_token(spec: ModelSpec, sequence: int, causal: bool = True) -> float:
    """FLOPs to train on one token: forward and backward, nothing computed twice.

    6 per matrix-product parameter (Kaplan et al., arXiv 2001.08361, section 2.1: 2 forward, 4 backward), plus
    attention's two products with the other tokens, 12 L H head_dim T (PaLM, arXiv 2204.02311, appendix B).
    PaLM counts every pair of tokens; `causal` counts the lower triangle only, half of them.
    """
    pairs = 0.5 if causal else 1.0
    attention = 12 * spec.layers * spec.heads * spec.head_dim * sequence * pairs
    return 6 * parameters(spec).matmul + attention


def forward_flops_per_token(spec: ModelSpec, sequence: int, causal: bool = True) -> float:
    """FLOPs of the forward pass on one token: a third of training's."""
    return training_flops_per_token(spec, sequence, causal) / 3


def mfu(tokens_per_second: float, flops_per_token: float, peak_flops: float, ranks: int) -> float:
    """Model FLOPs utilization (PaLM, arXiv 2204.02311, section 4.1): useful FLOP/s over all ranks' peak.

    `tokens_per_second` is that of the whole run, `peak_flops` one rank's peak in FLOP/s. Recomputation is not
    useful work and does not count.
    """
    return tokens_per_second * flops_per_token / (peak_flops * ranks)

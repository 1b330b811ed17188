"""Expert-merging warm-up of SPES (arXiv 2602.11543).

While experts are hardly specialized, each is moved toward the most similar ones, so that every token trains several.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def merge_ratio(step: int, alpha: float, steps: int) -> float:
    """Return the merge ratio alpha (1 - t / T), which falls linearly to 0 and stays there."""
    return alpha * max(0.0, 1 - step / steps) if steps else 0.0


def nearest_experts(gate_EFD: Tensor, nearest: int) -> Tensor:
    """Return the `nearest` most similar experts of each, [E, K], by the cosine of their input projections.

    An expert is not among its own neighbors, so K is at most E - 1.
    """
    flat_gates = gate_EFD.flatten(1).float()
    dot_products = flat_gates @ flat_gates.T
    norms = dot_products.diagonal().sqrt().clamp_min(torch.finfo(torch.float32).tiny)
    similarity = dot_products / (norms[:, None] * norms[None, :])
    similarity.fill_diagonal_(-torch.inf)
    return similarity.topk(min(nearest, len(flat_gates) - 1), dim=1).indices


@torch.no_grad()
def merge_experts(experts: Mapping[str, Tensor], alpha: float, nearest: int) -> None:
    """Move each expert of a layer toward the mean of its nearest ones, in place.

    theta_i + alpha (mean_j theta_j - theta_i), with all theta from before the merge.
    """
    first = experts["gate" if "gate" in experts else "up"]
    if alpha == 0 or len(first) < 2:
        return
    neighbors = nearest_experts(first, nearest)
    mixing = (
        torch.zeros(len(neighbors), len(neighbors))
        .scatter_(1, neighbors, alpha / neighbors.shape[1])
        .fill_diagonal_(1 - alpha)
    )
    for stacked in experts.values():
        stacked.copy_((mixing.to(stacked.dtype) @ stacked.flatten(1)).view_as(stacked))

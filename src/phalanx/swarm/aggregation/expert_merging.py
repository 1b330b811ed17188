"""The expert-merging warm-up of SPES (arXiv 2602.11543): while there is little to tell experts apart, each is drawn
towards those that are most like it, so that every token teaches several."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def merge_ratio(step: int, alpha: float, steps: int) -> float:
    """alpha (1 - t / T): falls to 0 in a line, and stays there."""
    return alpha * max(0.0, 1 - step / steps) if steps else 0.0


def nearest_experts(gate_EFD: Tensor, nearest: int) -> Tensor:
    """The experts that are most like each, [E, K], by the cosine of their input projections; itself is none of them.
    There are at most E - 1."""
    flat_gates = gate_EFD.flatten(1).float()
    dot_products = flat_gates @ flat_gates.T
    norms = dot_products.diagonal().sqrt().clamp_min(torch.finfo(torch.float32).tiny)
    similarity = dot_products / (norms[:, None] * norms[None, :])
    similarity.fill_diagonal_(-torch.inf)
    return similarity.topk(min(nearest, len(flat_gates) - 1), dim=1).indices


@torch.no_grad()
def merge_experts(experts: Mapping[str, Tensor], alpha: float, nearest: int) -> None:
    """Move each expert of a layer by `alpha` of the way to the mean of those `nearest` to it, all from where they were:
    theta_i + alpha (mean_j theta_j - theta_i). `experts` are the layer's stacked tensors, "gate" among them; in place.
    """
    if alpha == 0 or len(experts["gate"]) < 2:
        return
    neighbors = nearest_experts(experts["gate"], nearest)
    mixing = (
        torch.zeros(len(neighbors), len(neighbors))
        .scatter_(1, neighbors, alpha / neighbors.shape[1])
        .fill_diagonal_(1 - alpha)
    )
    for stacked in experts.values():
        stacked.copy_((mixing.to(stacked.dtype) @ stacked.flatten(1)).view_as(stacked))

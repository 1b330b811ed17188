"""Placement of a layer's experts on ranks.

A placement is an order of the experts, in which each rank gets a contiguous range of equal length.
"""

from __future__ import annotations

from collections.abc import Sequence


def balanced_expert_order(tokens_E: Sequence[float], ranks: int) -> list[int]:
    """Return an order of the experts that gives all ranks about the same number of tokens.

    Greedy: assign the busiest expert first, to the least loaded rank that has room (Graham's rule, SIAM J. Appl. Math.
    17, 1969, with an equal number of experts per rank). Returns the experts in their own order
    if that does not help.
    """
    identity_order = list(range(len(tokens_E)))
    experts_per_rank = len(tokens_E) // ranks
    rank_experts: list[list[int]] = [[] for _ in range(ranks)]
    for expert in sorted(identity_order, key=lambda expert: -tokens_E[expert]):
        target = min(
            (experts for experts in rank_experts if len(experts) < experts_per_rank),
            key=lambda experts: sum(tokens_E[other] for other in experts),
        )
        target.append(expert)
    order = [expert for experts in rank_experts for expert in sorted(experts)]
    return min(identity_order, order, key=lambda order: max_rank_load(tokens_E, order, ranks))


def max_rank_load(tokens_E: Sequence[float], order: Sequence[int], ranks: int) -> float:
    """Return the load of the busiest rank / mean load of the ranks; 1 is balanced.

    Args:
        tokens_E: Tokens of each expert, or weights in proportion to them.
        order: Experts in the order of the ranks, each rank's range after the previous one's.
        ranks: Number of ranks; divides the number of experts.
    """
    experts_per_rank = len(order) // ranks
    rank_loads = [
        sum(tokens_E[expert] for expert in order[start : start + experts_per_rank])
        for start in range(0, len(order), experts_per_rank)
    ]
    return max(rank_loads) * ranks / sum(rank_loads) if any(rank_loads) else 1.0

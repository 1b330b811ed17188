"""Which experts stand on one rank: an order of a layer's experts, of which each rank has a run of equal length."""

from __future__ import annotations

from collections.abc import Sequence


def balanced_expert_order(tokens_E: Sequence[float], ranks: int) -> list[int]:
    """An order in which ranks have about equally many tokens: the busiest experts first, each to the rank that has
    least to do and still has room (Graham's rule, SIAM J. Appl. Math. 17, 1969, with equally many experts for each);
    or the experts as they are, where that does not help."""
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
    """How much more than its share the busiest of so many ranks has to do: 1 is balanced."""
    experts_per_rank = len(order) // ranks
    rank_loads = [
        sum(tokens_E[expert] for expert in order[start : start + experts_per_rank])
        for start in range(0, len(order), experts_per_rank)
    ]
    return max(rank_loads) * ranks / sum(rank_loads) if any(rank_loads) else 1.0

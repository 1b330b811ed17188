"""Which experts stand on one rank: an order of a layer's experts, of which each rank has a run of equal length."""

from __future__ import annotations

from collections.abc import Sequence


def balanced_expert_order(tokens_E: Sequence[float], ranks: int) -> list[int]:
    """An order in which ranks have about equally many tokens: the busiest experts first, each to the rank that has
    least to do and still has room (Graham's rule, SIAM J. Appl. Math. 17, 1969, with equally many experts for each);
    or the experts as they are, where that does not help."""
    as_they_are, room = list(range(len(tokens_E))), len(tokens_E) // ranks
    placed: list[list[int]] = [[] for _ in range(ranks)]
    for expert in sorted(as_they_are, key=lambda expert: -tokens_E[expert]):
        least = min(
            (mine for mine in placed if len(mine) < room), key=lambda mine: sum(tokens_E[other] for other in mine)
        )
        least.append(expert)
    order = [expert for mine in placed for expert in sorted(mine)]
    return min(as_they_are, order, key=lambda order: max_rank_load(tokens_E, order, ranks))


def max_rank_load(tokens_E: Sequence[float], order: Sequence[int], ranks: int) -> float:
    """How much more than its share the busiest of so many ranks has to do: 1 is balanced."""
    room = len(order) // ranks
    of_rank = [sum(tokens_E[expert] for expert in order[first : first + room]) for first in range(0, len(order), room)]
    return max(of_rank) * ranks / sum(of_rank) if any(of_rank) else 1.0

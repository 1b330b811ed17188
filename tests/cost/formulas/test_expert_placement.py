"""Orders of experts are permutations, never worse than the original order, and balanced where the optimum is known."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.cost.formulas.expert_placement import balanced_expert_order, max_rank_load

LOADS = st.tuples(st.integers(1, 4), st.integers(1, 3)).flatmap(
    lambda sizes: st.tuples(
        st.lists(st.integers(0, 99), min_size=sizes[0] * sizes[1], max_size=sizes[0] * sizes[1]), st.just(sizes[0])
    )
)


@given(LOADS)
def test_balanced_expert_order_is_permutation_and_never_raises_max_load(tokens_and_ranks):
    tokens, ranks = tokens_and_ranks
    order = balanced_expert_order(tokens, ranks)
    assert sorted(order) == list(range(len(tokens)))
    assert 1 <= max_rank_load(tokens, order, ranks) <= max_rank_load(tokens, range(len(tokens)), ranks)


@given(st.lists(st.integers(0, 99), min_size=6, max_size=6))
def test_balanced_expert_order_is_within_four_thirds_of_optimum_on_two_ranks(tokens):
    """Graham's bound for two ranks is 7/6 with any number of experts per rank; with exactly three each it is larger."""
    best = min(max(sum(half), sum(tokens) - sum(half)) for half in combinations(tokens, 3))
    assert max_rank_load(tokens, balanced_expert_order(tokens, 2), 2) * sum(tokens) / 2 <= 4 / 3 * best


def test_balanced_expert_order_separates_hot_experts():
    assert balanced_expert_order([40, 30, 10, 20], 2) == [0, 2, 1, 3]
    assert max_rank_load([40, 30, 10, 20], [0, 1, 2, 3], 2) == pytest.approx(1.4)
    assert max_rank_load([40, 30, 10, 20], [0, 2, 1, 3], 2) == 1
    assert max_rank_load([0, 0], [0, 1], 2) == 1

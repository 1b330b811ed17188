"""Assignment of experts to nodes: each expert has as many owners as requested, in proportion to capacity, and few
experts change owners."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.cost.exact.swarm import node_share, state_bytes
from phalanx.spec.errors import UserError
from phalanx.spec.swarm import SwarmSpec
from phalanx.swarm.expert_ownership import Owners, assign_experts, experts_of, proportional_shares, rotate_owners
from phalanx.swarm.join import max_trained_experts
from tests.helpers.tiny_models import TINY_MOE

capacities = st.dictionaries(
    st.text("abcdefgh", min_size=1, max_size=3), st.integers(1, 20).map(float), min_size=1, max_size=9
)


def experts_per_node(owners: Owners) -> Counter[str]:
    return Counter(node for node_names in owners for node in node_names)


def test_assign_experts_gives_equal_nodes_contiguous_ranges():
    """As in SPES's code, node p of nodes with m experts each has those from p m on."""
    owners = assign_experts(8, dict.fromkeys("abcd", 1.0))
    assert [experts_of(owners, node) for node in "abcd"] == [(0, 1), (2, 3), (4, 5), (6, 7)]


def test_assign_experts_gives_each_expert_two_owners_with_replication_2():
    owners = assign_experts(8, dict.fromkeys("abcd", 1.0), replication=2)
    assert [experts_of(owners, node) for node in "abcd"] == [(0, 1, 2, 3), (4, 5, 6, 7)] * 2


def test_proportional_shares_follow_node_capacity():
    assert proportional_shares(16, 16, {"small": 8, "large": 24}) == {"small": 4, "large": 12}
    assert proportional_shares(8, 8, {"a": 1, "b": 1, "c": 1}) == {"a": 3, "b": 3, "c": 2}
    assert proportional_shares(16, 8, {"a": 1, "b": 100}) == {"a": 8, "b": 8}  # a node has an expert only once


@given(nodes=capacities, share=st.floats(0, 1), max_share=st.integers(1, 40))
def test_proportional_shares_respect_capacity_and_sum_to_total(nodes, share, max_share):
    """No node gets more than its capacity, or differs from its exact proportion by one or more."""
    room = int(sum(nodes.values()))
    places = int(share * min(room, max_share * len(nodes)))
    shares = proportional_shares(places, max_share, nodes)
    assert sum(shares.values()) == places
    assert all(0 <= count <= max_share for count in shares.values())
    if max(nodes.values()) <= max_share:
        for node, count in shares.items():
            assert count <= nodes[node]
            assert abs(count - places * nodes[node] / room) < 1


@pytest.mark.parametrize("capacities", [(4, 1, 1, 1, 1), (4, 1, 1, 1, 1, 1), (10, 1, 1, 1, 1, 1, 1, 1, 1)])
def test_proportional_shares_stay_within_capacity_with_one_large_node(capacities):
    nodes = {str(number): float(capacity) for number, capacity in enumerate(capacities)}
    places = {5: 7, 6: 8, 9: 16}[len(nodes)]
    shares = proportional_shares(places, places, nodes)
    assert sum(shares.values()) == places
    assert all(shares[node] <= nodes[node] for node in nodes)


@given(experts=st.integers(1, 40), nodes=capacities, replication=st.integers(1, 4))
def test_assign_experts_gives_every_expert_distinct_owners(experts, nodes, replication):
    owners = assign_experts(experts, nodes, replication)
    copies = min(replication, len(nodes))
    assert [len(set(names)) for names in owners] == [copies] * experts
    assert experts_per_node(owners) == Counter(proportional_shares(experts * copies, experts, nodes))


@given(experts=st.integers(1, 24), nodes=capacities, later=capacities, replication=st.integers(1, 3))
def test_assign_experts_moves_minimum_number_of_experts_on_reassignment(experts, nodes, later, replication):
    """A node loses only as many experts as its share has shrunk by, unless experts have fewer owners than before."""
    before = assign_experts(experts, nodes, replication)
    after = assign_experts(experts, later, replication, before)
    copies = min(replication, len(later))
    assert [len(set(names)) for names in after] == [copies] * experts
    assert experts_per_node(after) == Counter(proportional_shares(experts * copies, experts, later))
    if replication == 1:
        kept = sum(set(a) == set(b) for a, b in zip(before, after, strict=True))
        counts_before, counts_after = experts_per_node(before), experts_per_node(after)
        assert kept == sum(min(counts_before[node], counts_after[node]) for node in later)


def test_assign_experts_is_unchanged_when_nodes_are_unchanged():
    nodes = {"a": 3.0, "b": 1.0, "c": 2.0}
    before = assign_experts(12, nodes, 2)
    assert assign_experts(12, nodes, 2, before) == before


def test_assign_experts_moves_experts_of_lost_node_to_remaining_nodes():
    before = assign_experts(8, dict.fromkeys("abcd", 1.0))
    after = assign_experts(8, dict.fromkeys("abd", 1.0), previous_owners=before)
    assert all(set(experts_of(before, node)) <= set(experts_of(after, node)) for node in "abd")
    assert experts_per_node(after) == {"a": 3, "b": 3, "d": 2}


def test_rotate_owners_brings_every_expert_to_every_node():
    owners, seen = assign_experts(4, dict.fromkeys("abcd", 1.0)), set()
    for _ in range(4):
        seen |= {(expert, node) for expert, names in enumerate(owners) for node in names}
        owners = rotate_owners(owners, "abcd")
    assert len(seen) == 16
    assert owners == assign_experts(4, dict.fromkeys("abcd", 1.0))


@pytest.mark.parametrize("experts", [1, 3])
def test_assign_experts_gives_all_experts_to_single_node(experts):
    assert assign_experts(experts, {"alone": 2.0}, 3) == (("alone",),) * experts


def test_max_trained_experts_doubles_when_two_ranks_shard_experts():
    """Each rank has half of an expert, and all other parameters."""
    swarm = SwarmSpec(method="spes", nodes=2)
    for own in (1, 2, 4):
        memory = state_bytes(node_share(TINY_MOE, "spes", own), swarm.frozen_expert_codec)
        assert max_trained_experts(TINY_MOE, swarm, memory) == own
        assert max_trained_experts(TINY_MOE, swarm, memory, model_parallel_size=2) == 2 * own
    with pytest.raises(UserError, match="that the state of a node needs"):
        max_trained_experts(
            TINY_MOE,
            swarm,
            state_bytes(node_share(TINY_MOE, "spes", 0), swarm.frozen_expert_codec),
            model_parallel_size=2,
        )

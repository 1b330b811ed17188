"""NCCL's own expectations: its tuning model for nodes of 8 GPUs with NVLink."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.cost.formulas.nccl import all_reduce_latency_seconds
from phalanx.spec.errors import UserError

PROTOCOLS = ("LL", "LL128", "Simple")
RING_LATENCIES = {
    1: ("15.0", "40.6", "56.0"),
    2: ("40.0", "75.2", "131.6"),
    4: ("78.8", "144.4", "282.8"),
    16: ("311.6", "559.6", "1190"),
    128: ("2484", "4435", "9657"),
}
TREE_LATENCIES = {
    1: ("15.2", "31.5", "64.4"),
    2: ("25.2", "48.5", "92.4"),
    4: ("35.2", "65.5", "120.4"),
    16: ("55.2", "99.5", "176.4"),
    128: ("85.2", "150.5", "260.4"),
}
LATENCY_CASES = [
    (algorithm, protocol, nodes, printed)
    for algorithm, table in (("ring", RING_LATENCIES), ("tree", TREE_LATENCIES))
    for nodes, row in table.items()
    for protocol, printed in zip(PROTOCOLS, row, strict=True)
]
NODES, RANKS_PER_NODE = st.integers(1, 24), st.integers(2, 16)


@pytest.mark.parametrize(("algorithm", "protocol", "nodes", "printed"), LATENCY_CASES)
def test_all_reduce_latency_matches_nccl_tuning_table(algorithm, protocol, nodes, printed):
    latency = 1e6 * all_reduce_latency_seconds(algorithm, protocol, nodes, 8)
    assert f"{latency:.{len(printed.partition('.')[2])}f}" == printed


@pytest.mark.parametrize(
    ("protocol", "cpu", "microseconds"),
    [
        ("LL", "amd", 6.6 + 28 * 2 + 2 * 2.7),
        ("LL128", "amd", 14 + 28 * 2 + 2 * 4),
        ("Simple", "amd", 8.4 + 28 * 6 + 28),
    ],
)
def test_ring_latency_across_nodes_is_higher_on_amd_hosts(protocol, cpu, microseconds):
    assert all_reduce_latency_seconds("ring", protocol, 2, 8, cpu=cpu) == pytest.approx(1e-6 * microseconds)
    one_node = [all_reduce_latency_seconds("ring", protocol, 1, 8, cpu=cpu_name) for cpu_name in ("intel", cpu)]
    assert one_node[0] == one_node[1]


@pytest.mark.parametrize(
    ("algorithm", "hops"),
    [("ring", {"LL": 1.0, "LL128": 2.5, "Simple": 5.7}), ("tree", {"LL": 1.0, "LL128": 1.9, "Simple": 4.0})],
)
def test_all_reduce_latency_uses_pci_hops_without_nvlink(algorithm, hops):
    for protocol, hop in hops.items():
        two_ranks, eight = (all_reduce_latency_seconds(algorithm, protocol, 1, n, link="pci") for n in (1, 8))
        assert eight - two_ranks == pytest.approx(14e-6 * hop)


def test_ring_latency_uses_tree_network_hop_with_one_rank_per_node():
    assert all_reduce_latency_seconds("ring", "LL", 4, 1) == pytest.approx(1e-6 * (6.6 + 6 * 5))
    assert all_reduce_latency_seconds("tree", "LL", 4, 1) == pytest.approx(1e-6 * (6.8 + 4 * 5))


@given(st.sampled_from(PROTOCOLS), NODES, RANKS_PER_NODE)
def test_all_reduce_latency_is_logarithmic_for_tree_and_linear_for_ring(protocol, nodes, ranks_per_node):
    def growth(algorithm, first, second):
        return all_reduce_latency_seconds(algorithm, protocol, second, ranks_per_node) - all_reduce_latency_seconds(
            algorithm, protocol, first, ranks_per_node
        )

    assert growth("tree", nodes, 2 * nodes) == pytest.approx(growth("tree", 1, 2))
    assert growth("ring", 2, 2 + nodes) == pytest.approx(nodes * growth("ring", 2, 3))


def test_all_reduce_latency_rejects_zero_counts():
    with pytest.raises(UserError, match=r"^nodes = 0"):
        all_reduce_latency_seconds("ring", "LL", 0, 8)
    with pytest.raises(UserError, match=r"^ranks_per_node = 0"):
        all_reduce_latency_seconds("ring", "LL", 1, 0)

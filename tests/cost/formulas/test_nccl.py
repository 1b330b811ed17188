"""NCCL's own expectations, as its tuning model gives them for nodes of 8 GPUs with NVLink."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.cost.formulas.collectives import bus_factor
from phalanx.cost.formulas.nccl import (
    LINK_BYTES_PER_SECOND,
    all_reduce_bytes_per_second,
    all_reduce_latency_seconds,
    all_reduce_seconds,
)
from phalanx.spec.errors import UserError

PROTOCOLS = ("LL", "LL128", "Simple")
RING = {
    1: ("15.0", "40.6", "56.0"),
    2: ("40.0", "75.2", "131.6"),
    4: ("78.8", "144.4", "282.8"),
    16: ("311.6", "559.6", "1190"),
    128: ("2484", "4435", "9657"),
}
TREE = {
    1: ("15.2", "31.5", "64.4"),
    2: ("25.2", "48.5", "92.4"),
    4: ("35.2", "65.5", "120.4"),
    16: ("55.2", "99.5", "176.4"),
    128: ("85.2", "150.5", "260.4"),
}
ROWS = [
    (algorithm, protocol, nodes, printed)
    for algorithm, table in (("ring", RING), ("tree", TREE))
    for nodes, row in table.items()
    for protocol, printed in zip(PROTOCOLS, row, strict=True)
]
NODES, RANKS_PER_NODE = st.integers(1, 24), st.integers(2, 16)


@pytest.mark.parametrize(("algorithm", "protocol", "nodes", "printed"), ROWS)
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
    one_node = [all_reduce_latency_seconds("ring", protocol, 1, 8, cpu=each) for each in ("intel", cpu)]
    assert one_node[0] == one_node[1]


@pytest.mark.parametrize(
    ("algorithm", "hops"),
    [("ring", {"LL": 1.0, "LL128": 2.5, "Simple": 5.7}), ("tree", {"LL": 1.0, "LL128": 1.9, "Simple": 4.0})],
)
def test_all_reduce_latency_uses_pci_hops_without_nvlink(algorithm, hops):
    for protocol, hop in hops.items():
        alone, eight = (all_reduce_latency_seconds(algorithm, protocol, 1, n, link="pci") for n in (1, 8))
        assert eight - alone == pytest.approx(14e-6 * hop)


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


@given(st.floats(1e9, 1e12), NODES, RANKS_PER_NODE)
def test_all_reduce_bandwidth_matches_protocol_efficiencies(bus, nodes, ranks_per_node):
    def speed(algorithm, protocol):
        return all_reduce_bytes_per_second(algorithm, protocol, nodes, ranks_per_node, bus)

    assert speed("ring", "Simple") * bus_factor("all_reduce", nodes * ranks_per_node) == pytest.approx(bus)
    assert speed("tree", "Simple") == pytest.approx(0.92 * bus / 2)
    assert speed("ring", "LL") == pytest.approx(speed("ring", "Simple") / 2)
    assert speed("ring", "LL128") == pytest.approx(speed("ring", "Simple") * 0.92)
    assert speed("tree", "LL") == pytest.approx(speed("tree", "Simple") / 3.8)
    assert speed("tree", "LL128") == pytest.approx(speed("tree", "Simple") * (7 / 9 if nodes == 1 else 15 / 16))


@pytest.mark.parametrize(("generation", "links", "published"), [("ampere", 12, 235e9), ("hopper", 18, 367e9)])
def test_nvlink_bandwidth_matches_measured_bus_bandwidth(generation, links, published):
    assert links * LINK_BYTES_PER_SECOND[generation] == pytest.approx(published, rel=0.03)


def test_ll_bandwidth_is_capped_within_one_node():
    speeds = [all_reduce_bytes_per_second("ring", "LL", nodes, 8, 400e9, "hopper") for nodes in (1, 2)]
    assert speeds == pytest.approx([141e9 * 8 / 14, 200e9 * 16 / 30])


def test_all_reduce_seconds_is_latency_plus_bytes_over_bandwidth():
    """1 GiB over 8 ranks at 469.762 GB/s takes 4 ms and the latency."""
    seconds = all_reduce_seconds(2**30, "ring", "Simple", 1, 8, 469.762048e9, channels=16)
    assert seconds == pytest.approx(4e-3 + 56.0e-6)


def test_simple_ring_latency_rises_for_large_messages_across_nodes():
    def latency(size_bytes, protocol="Simple"):
        return all_reduce_seconds(size_bytes, "ring", protocol, 2, 8, 1e30, channels=4)

    assert latency(64 * 4 * 16 - 1) == pytest.approx(131.6e-6)
    assert latency(64 * 4 * 16) == pytest.approx(1.4 * 131.6e-6)
    assert latency(64 * 4 * 16, "LL128") == pytest.approx(75.2e-6)


def test_nccl_model_rejects_zero_counts_and_single_rank():
    with pytest.raises(UserError, match=r"^nodes = 0"):
        all_reduce_latency_seconds("ring", "LL", 0, 8)
    with pytest.raises(UserError, match=r"^ranks_per_node = 0"):
        all_reduce_bytes_per_second("ring", "LL", 1, 0, 1e9)
    with pytest.raises(UserError, match=r"^ranks = 1"):
        all_reduce_bytes_per_second("ring", "LL", 1, 1, 1e9)

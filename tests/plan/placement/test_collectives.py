"""Figures of collectives over all ranks of a run: conditions of formulas, nodes and links."""

from __future__ import annotations

import pytest

from phalanx.cost.formulas.nccl import all_reduce_latency_seconds
from phalanx.cost.formulas.rail_fabric import hierarchical_all_reduce
from phalanx.plan.placement.collectives import BUFFER_BYTES, fabric_loads, nccl_latencies
from phalanx.plan.placement.findings import node_layout
from phalanx.spec.cluster import ClusterSpec

SITE = node_layout(ClusterSpec(), 8)


def test_fabric_loads_are_those_of_a_rail_fabric_of_the_nodes():
    loads = fabric_loads(16, SITE, 50e9, 2.0)
    load = hierarchical_all_reduce(BUFFER_BYTES, 2, 8)
    assert loads["all-reduce, hierarchical"] == {
        "nic_bytes": load.nic_bytes,
        "nvlink_bytes": load.nvlink_bytes,
        "spine_share": 0.0,
        "seconds": pytest.approx(load.nic_bytes / 50e9),
    }
    assert loads["all-to-all, direct"]["spine_share"] == 0.875
    assert loads["all-to-all, direct"]["seconds"] == pytest.approx(1.75 * 5e8 / 50e9)
    assert fabric_loads(16, SITE, None, 1.0)["all-to-all, PXN"]["seconds"] is None


@pytest.mark.parametrize("world_size", [4, 8, 12])
def test_fabric_loads_are_empty_unless_ranks_fill_several_nodes(world_size):
    assert fabric_loads(world_size, SITE, 50e9, 1.0) == {}


def test_nccl_latencies_follow_nodes_and_links():
    assert nccl_latencies(16, SITE)["tree"]["LL"] == all_reduce_latency_seconds("tree", "LL", 2, 8)
    assert nccl_latencies(4, SITE)["ring"]["LL"] == all_reduce_latency_seconds("ring", "LL", 1, 4)
    without_nvlink = node_layout(ClusterSpec(fast_link_domain=1), 8)
    assert nccl_latencies(8, without_nvlink)["ring"]["LL"] == all_reduce_latency_seconds("ring", "LL", 1, 8, link="pci")


def test_nccl_latencies_are_empty_for_one_rank_and_partly_filled_node():
    assert nccl_latencies(1, SITE) == nccl_latencies(12, SITE) == {}

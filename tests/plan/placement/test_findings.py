"""Links and NICs of a node's topology, loads on them, and findings about a placement."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phalanx.plan.placement.findings import (
    NodeLayout,
    bytes_by_link,
    nic_loads,
    node_layout,
    placement_findings,
    with_pxn,
)
from phalanx.plan.placement.traffic_matrix import TrafficMatrix, traffic_matrices
from phalanx.spec.cluster import ClusterSpec
from phalanx.spec.errors import UserError
from phalanx.spec.parallel_dims import parallel_dims
from phalanx.spec.resolved_run import ResolvedRun
from phalanx.spec.topology.node import NodeTopology
from phalanx.spec.topology.read import parse_topology, read_topology
from tests.helpers.placement_runs import DENSE, MOE, make_node_layout, make_run, matrix_entries

TOPOLOGIES = Path(__file__).parents[2] / "spec" / "topology" / "topologies"


def test_with_pxn_relays_only_over_fast_links() -> None:
    """Device 0 relays over the fast link to device 1, but not to device 3. The last node has no device 3."""
    pairs = NodeLayout(domain=(0, 0, 1, 1), rail=(0, 1, 2, 3), nics=(("a",), ("b",), ("c",), ("d",)))
    sent = TrafficMatrix(8, np.array([0, 0]), np.array([5, 7]), np.array([1.0, 2.0]))
    assert matrix_entries(with_pxn(sent, pairs)) == {(0, 1): 1.0, (1, 5): 1.0, (0, 7): 2.0}
    last = TrafficMatrix(6, np.array([4]), np.array([3]), np.array([1.0]))
    assert matrix_entries(with_pxn(last, make_node_layout(4))) == {(4, 3): 1.0}


def test_nic_loads_split_traffic_of_device_with_two_nics() -> None:
    node = NodeTopology(
        gpus=("GPU0", "GPU1"),
        nics=("a", "b", "c"),
        links=(("X", "NV1"), ("NV1", "X")),
        nic_paths=(("PIX", "PIX", "SYS"), ("SYS", "SYS", "PIX")),
        numa_nodes=(0, 0),
        nvlinks=(1, 1),
        rails=(7, 7, 7),
    )
    two_nodes = node_layout(ClusterSpec(), 2, node)
    assert (two_nodes.rail, two_nodes.nics) == ((7, 7), (("a", "b"), ("c",)))
    loads = nic_loads(TrafficMatrix(4, np.array([0]), np.array([3]), np.array([8.0])), two_nodes)
    assert [(load.sent_bytes, load.received_bytes) for load in loads] == [
        (4, 0),
        (4, 0),
        (0, 0),
        (0, 0),
        (0, 0),
        (0, 8),
    ]


def test_node_layout_reads_fast_links_and_nics_from_topology() -> None:
    h100 = node_layout(ClusterSpec(), 8, read_topology(TOPOLOGIES / "h100-nv18.txt"))
    assert (h100.domain, h100.rail, h100.span) == ((0,) * 8, tuple(range(8)), 1)
    assert len({name for nics in h100.nics for name in nics}) == 8
    assert node_layout(ClusterSpec(), 2, read_topology(TOPOLOGIES / "rtx4090-pcie.txt")).domain == (0, 1)
    with pytest.raises(UserError, match="exceeds the 8 GPUs"):
        node_layout(ClusterSpec(), 9, read_topology(TOPOLOGIES / "h100-nv18.txt"))


SHARED_NICS_TOPOLOGY = """\tGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tNIC1
GPU0\tX\tNV4\tSYS\tSYS\tPIX\tSYS
GPU1\tNV4\tX\tSYS\tSYS\tPIX\tSYS
GPU2\tSYS\tSYS\tX\tNV4\tSYS\tPIX
GPU3\tSYS\tSYS\tNV4\tX\tSYS\tPIX
"""


def test_node_layout_classifies_links_of_gpu_pairs_with_shared_nics() -> None:
    """Two GPUs share a NIC: GPU 0 of one node reaches GPU 1 of another on one rail."""
    pairs = node_layout(ClusterSpec(), 4, parse_topology(SHARED_NICS_TOPOLOGY))
    assert (pairs.domain, pairs.rail) == ((0, 0, 1, 1), (0, 0, 1, 1))
    source, target = np.zeros(5, np.int64), np.array([1, 2, 4, 5, 6])
    assert pairs.links(source, target).tolist() == [0, 1, 2, 2, 3]
    sent = TrafficMatrix(8, source, target, np.full(5, 10.0))
    assert bytes_by_link(sent, pairs) == {"fast": 10, "node": 10, "rail": 20, "spine": 10}
    loads = {(load.node, load.nic): (load.sent_bytes, load.received_bytes) for load in nic_loads(sent, pairs)}
    assert loads == {(0, "NIC0"): (30, 0), (0, "NIC1"): (0, 0), (1, "NIC0"): (0, 20), (1, "NIC1"): (0, 10)}


def test_node_layout_fast_link_domain_spans_several_nodes() -> None:
    """72 GPUs of 18 nodes share a domain. A preset of 8 GPUs does not join nodes on which the run has 4 ranks."""
    rack = node_layout(ClusterSpec(preset="gb200", fast_link_domain=72), 4)
    assert (rack.span, rack.ranks_per_island) == (18, 72)
    links = rack.links(np.array([0, 0, 0]), np.array([71, 72, 73]))
    assert links.tolist() == [0, 2, 3]
    half = node_layout(ClusterSpec(preset="h100", fast_link_domain=8), 4)
    assert (half.span, half.domain) == (1, (0, 0, 0, 0))
    assert node_layout(ClusterSpec(fast_link_domain=2), 4).domain == (0, 0, 1, 1)


def findings_by_axis(
    layout: dict[str, Any], world_size: int, nproc: int, model: dict[str, Any] = DENSE, **cluster: Any
) -> dict[str, str]:
    run, node_layout = make_run(layout, model), make_node_layout(nproc)
    parts = traffic_matrices(ResolvedRun(run, world_size), node_layout.ranks_per_island)
    findings = placement_findings(parallel_dims(run.layout, world_size), parts, node_layout, ClusterSpec(**cluster))
    return {f"{finding.verdict} {finding.axis}": f"{finding.message}; {finding.fix}" for finding in findings}


def test_placement_findings_flag_tp_groups_that_leave_fast_domain() -> None:
    assert findings_by_axis({"tp": 2}, 4, 2)["good tp"].startswith("every tp group is inside a fast domain (2 devices)")
    finding = findings_by_axis({"tp": 4}, 8, 2)["bad tp"]
    assert finding.startswith(
        "2 of 2 tp groups extend beyond a fast domain (2 devices); the first has ranks 0 1 2 3; "
        "make layout.tp a divisor of 2"
    )
    assert "note ep" in findings_by_axis({"ep": 4}, 4, 2, MOE)
    spread = findings_by_axis({"pp": 4, "ep": 2}, 8, 4, MOE)["note ep"]
    assert spread.endswith('make layout.ep a divisor of 4 with layout.rank_order = "pipeline_outer"')
    assert "good ep" in findings_by_axis({"pp": 4, "ep": 2, "rank_order": "pipeline_outer"}, 8, 4, MOE)


def test_placement_findings_flag_pipeline_neighbors_on_different_rails() -> None:
    """Stages of 2 ranks are on nodes of 4: the second stage is on devices 2
    and 3, the third on 0 and 1 of the next node."""
    assert "good pp" in findings_by_axis({"pp": 2, "tp": 2}, 4, 2)
    assert findings_by_axis({"pp": 4, "tp": 2}, 8, 4)["bad pp"].startswith(
        "4 of 4 pairs of pipeline neighbors on different nodes are on different rails; make tp x cp a multiple of 4"
    )
    assert not [key for key in findings_by_axis({"pp": 2, "tp": 2}, 4, 4) if key.endswith("pp")]
    finding = findings_by_axis({"pp": 2, "tp": 2, "rank_order": "pipeline_outer"}, 12, 4)["bad pp"]
    assert finding.endswith("make dp x tp x cp a multiple of 4, or dp x tp x cp x pp a divisor of 4")


def test_placement_findings_flag_partial_nodes_and_oversubscribed_spine() -> None:
    """In an all-to-all of 2 x 4 devices, 3 of 4 devices on the other node are
    on another rail. Gradients stay on their rail."""
    assert findings_by_axis({}, 6, 4)["bad nodes"].startswith("the last node has 2 of 4 ranks")
    run = make_run({"ep": 8}, MOE)
    parts = [bytes_by_link(part, make_node_layout(4)) for part in traffic_matrices(ResolvedRun(run, 8), 4).values()]
    rail, spine = (sum(part[link] for part in parts) for link in ("rail", "spine"))
    share = spine / (rail + spine)
    assert 0.5 < share < 0.75
    assert findings_by_axis({"ep": 8}, 8, 4, MOE, oversubscription=4.0)["bad spine"].startswith(
        f"{share:.0%} of the network's bytes cross a spine of 4:1: the network is {4 * share:.2f} times slower"
    )
    assert "bad spine" not in findings_by_axis({"ep": 8}, 8, 4, MOE)

"""Placement of ranks: the links that their traffic uses, and problems of the placement.

Rank r is on node r // nproc, on device r mod nproc. A rail is the network of the NICs with the same index. NICs of one
rail reach each other through leaf switches; traffic between rails crosses the spine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from phalanx.cost.formulas.rail_fabric import oversubscription_slowdown
from phalanx.plan.placement.traffic_matrix import Ranks, Sizes, TrafficMatrix, merge_matrices
from phalanx.spec.cluster import ClusterSpec
from phalanx.spec.errors import UserError
from phalanx.spec.formatting import plural
from phalanx.spec.parallel_dims import ParallelDims, expert_parallel_groups, process_groups
from phalanx.spec.topology.node import NodeTopology
from phalanx.spec.topology.read import MAX_NVLINK_GPUS_PER_NODE

LINK_KINDS = {
    "fast": "fast links",
    "node": "same node",
    "rail": "same rail",
    "spine": "cross-rail",
}
"""Kinds of links between two ranks, nearest first.

A fast-link domain; a node without fast links; nodes on one rail; and different rails, over the spine.
"""
FIRST_NETWORK_LINK = 2
"""Index of the first link kind that leaves the node."""
MAX_SHOWN_RANKS = 8
"""Maximum number of ranks of a group that a message lists."""


@dataclass(frozen=True, kw_only=True)
class NodeLayout:
    """Devices and links of a node, equal for all nodes; tuples have one entry per device."""

    domain: tuple[int, ...]
    """Index of the device's fast-link group in the node."""
    rail: tuple[int, ...]
    """Rail of the device's NICs."""
    nics: tuple[tuple[str, ...], ...]
    """Network devices nearest to the device, which share its traffic."""
    span: int = 1
    """Number of consecutive nodes whose devices are connected by fast links."""
    assumed: tuple[str, ...] = ()
    """Assumptions for unknown facts."""

    @property
    def nproc(self) -> int:
        """Ranks per node."""
        return len(self.domain)

    @property
    def ranks_per_island(self) -> int:
        """Consecutive ranks on one node, or on nodes that fast links connect."""
        return self.nproc * self.span

    def domain_of(self, ranks: Ranks) -> Ranks:
        """Return the index of each rank's fast-link domain."""
        return np.asarray(ranks // self.ranks_per_island * self.nproc + np.array(self.domain)[ranks % self.nproc])

    def rail_of(self, ranks: Ranks) -> Ranks:
        """Return the rail of each rank."""
        return np.array(self.rail)[ranks % self.nproc]

    def links(self, source: Ranks, target: Ranks) -> Ranks:
        """Return the kind of link between pairs of ranks, as an index into `LINK_KINDS`."""
        is_fast = self.domain_of(source) == self.domain_of(target)
        same_node = source // self.nproc == target // self.nproc
        same_rail = self.rail_of(source) == self.rail_of(target)
        return np.select([is_fast, same_node, same_rail], [0, 1, 2], 3)


def node_layout(cluster: ClusterSpec, nproc: int, topology: NodeTopology | None = None) -> NodeLayout:
    """Return the nodes of a cluster, from its description and the topology of one node.

    A preset's domain of up to 16 devices is inside a node; a larger one connects nodes. Raises UserError if there are
    more ranks than GPUs in the topology.
    """
    size = cluster.fast_link_domain or nproc
    spans_nodes = size > nproc and (cluster.preset is None or size > MAX_NVLINK_GPUS_PER_NODE)
    domain = tuple(device // size for device in range(nproc))
    span = size // nproc if spans_nodes else 1
    rail = tuple(range(nproc))
    nics: tuple[tuple[str, ...], ...] = tuple((f"nic{device}",) for device in rail)
    assumed = [] if cluster.fast_link_domain else [f"fast links connect the {nproc} devices of a node"]
    if topology is None:
        assumed.append("every device has its own NIC, on the rail of its index")
        return NodeLayout(domain=domain, rail=rail, nics=nics, span=span, assumed=tuple(assumed))
    if nproc > len(topology.gpus):
        problem = f"exceeds the {len(topology.gpus)} GPUs of the topology"
        raise UserError("--nproc", nproc, problem, fix=f"use at most {len(topology.gpus)}, or omit --topology")
    if None not in topology.nvlinks and span == 1:
        assumed = []
        domain = tuple(next(i for i, d in enumerate(topology.nvlink_domains()) if gpu in d) for gpu in range(nproc))
    if topology.nics:
        nics = tuple(topology.nearest_nics(gpu) for gpu in range(nproc))
        # NCCL's rail of each device's first NIC; otherwise one rail per set of nearest NICs.
        rail_by_nic = dict(zip(topology.nics, topology.rails, strict=False))
        nic_sets = list(dict.fromkeys(nics))
        nccl_rails = [number for local_nics in nics if (number := rail_by_nic.get(local_nics[0])) is not None]
        rail = (
            tuple(nccl_rails) if len(nccl_rails) == nproc else tuple(nic_sets.index(local_nics) for local_nics in nics)
        )
    else:
        assumed.append("every device has its own NIC, because the topology lists none")
    return NodeLayout(domain=domain, rail=rail, nics=nics, span=span, assumed=tuple(assumed))


def with_pxn(matrix: TrafficMatrix, site: NodeLayout) -> TrafficMatrix:
    """Return the traffic with NCCL's PXN (PCI x NVLink, since 2.12).

    Bytes for another rail first go over fast links to a neighbor on that rail, if there is one, and leave from there.
    Both hops count.
    """
    device_on_rail = {rail: device for device, rail in reversed(list(enumerate(site.rail)))}
    device_by_rail = np.array([device_on_rail[rail] for rail in site.rail])
    ranks = matrix.ranks
    source = matrix.source
    target = matrix.target
    neighbor = source // site.nproc * site.nproc + device_by_rail[target % site.nproc]
    is_relayed = (site.links(source, target) == 3) & (neighbor < ranks)
    is_relayed &= site.domain_of(source) == site.domain_of(neighbor)
    to_network = TrafficMatrix(ranks, np.where(is_relayed, neighbor, source), target, matrix.bytes)
    to_neighbor = TrafficMatrix(ranks, source[is_relayed], neighbor[is_relayed], matrix.bytes[is_relayed])
    return merge_matrices(ranks, [to_network, to_neighbor])


def bytes_by_link(matrix: TrafficMatrix, site: NodeLayout) -> dict[str, float]:
    """Return the bytes over each kind of link."""
    sums = np.bincount(site.links(matrix.source, matrix.target), matrix.bytes, len(LINK_KINDS))
    return dict(zip(LINK_KINDS, map(float, sums), strict=True))


@dataclass(frozen=True)
class NicLoad:
    """Load of one network device of a node in one optimizer update."""

    node: int
    nic: str
    sent_bytes: float
    received_bytes: float


def nic_loads(matrix: TrafficMatrix, site: NodeLayout) -> list[NicLoad]:
    """Return the load of every network device that is nearest to a rank.

    The nearest devices of a rank share its traffic evenly.
    """
    names = list(dict.fromkeys(name for local_nics in site.nics for name in local_nics))
    share = np.array([[(name in local_nics) / len(local_nics) for name in names] for local_nics in site.nics])
    is_remote = site.links(matrix.source, matrix.target) >= FIRST_NETWORK_LINK
    nodes = -(-matrix.ranks // site.nproc)

    def bytes_per_nic(ranks: Ranks) -> Sizes:
        rank_bytes = np.zeros(nodes * site.nproc)
        np.add.at(rank_bytes, ranks[is_remote], matrix.bytes[is_remote])
        return np.asarray(rank_bytes.reshape(nodes, site.nproc) @ share)

    sent = bytes_per_nic(matrix.source)
    received = bytes_per_nic(matrix.target)
    return [
        NicLoad(node, name, float(sent[node, index]), float(received[node, index]))
        for node in range(nodes)
        for index, name in enumerate(names)
    ]


@dataclass(frozen=True)
class PlacementFinding:
    """Property of the placement, and its verdict."""

    verdict: Literal["good", "note", "bad"]
    axis: str
    message: str
    fix: str = ""


def placement_findings(
    sizes: ParallelDims, parts: dict[str, TrafficMatrix], site: NodeLayout, cluster: ClusterSpec
) -> list[PlacementFinding]:
    """Return all findings on a placement, worst first."""
    findings = [*_check_domains(sizes, site), *_check_rails(sizes, parts, site), *_check_spine(parts, site, cluster)]
    if sizes.world_size % site.nproc:
        last_node_ranks = sizes.world_size % site.nproc
        message = (
            f"the last node has {last_node_ranks} of {site.nproc} ranks, "
            "but torchrun starts an equal number on every node"
        )
        findings.append(PlacementFinding("bad", "nodes", message, fix=f"use a multiple of {site.nproc} ranks"))
    return sorted(findings, key=lambda finding: ["bad", "note", "good"].index(finding.verdict))


def _check_domains(sizes: ParallelDims, site: NodeLayout) -> Iterator[PlacementFinding]:
    """Yield findings on groups that communicate in every layer.

    They belong inside a fast domain: tensor-parallel groups must be, others should be.
    """
    domain = int(np.bincount(site.domain_of(np.arange(site.ranks_per_island))).max())
    domain_text = f"a fast domain ({plural(domain, 'device')})"
    advice = ' with layout.rank_order = "pipeline_outer"' if sizes.pp > 1 and not sizes.pipeline_outermost else ""
    for axis, groups, fix in (
        ("tp", process_groups(sizes, "tp"), f"make layout.tp a divisor of {domain}"),
        ("cp", process_groups(sizes, "cp"), f"make layout.tp x layout.cp a divisor of {domain}"),
        ("ep", expert_parallel_groups(sizes), f"make layout.ep a divisor of {domain}{advice}"),
    ):
        if not groups or len(groups[0]) == 1:
            continue
        domains = site.domain_of(np.array(groups))
        leaving = np.flatnonzero((domains != domains[:, :1]).any(1))
        if len(leaving):
            ellipsis = " ..." if len(groups[0]) > MAX_SHOWN_RANKS else ""
            first_ranks = " ".join(map(str, groups[leaving[0]][:MAX_SHOWN_RANKS])) + ellipsis
            message = (
                f"{len(leaving)} of {len(groups)} {axis} groups extend beyond {domain_text}; "
                f"the first has ranks {first_ranks}"
            )
            yield PlacementFinding("bad" if axis == "tp" else "note", axis, message, fix)
        else:
            yield PlacementFinding("good", axis, f"every {axis} group is inside {domain_text}")


def _check_rails(sizes: ParallelDims, parts: dict[str, TrafficMatrix], site: NodeLayout) -> Iterator[PlacementFinding]:
    """Yield findings on rails: stages and data-parallel neighbors on different nodes should share a rail."""
    stage_product, replica_product = (
        ("dp x tp x cp", "tp x cp") if sizes.pipeline_outermost else ("tp x cp", "tp x cp x pp")
    )
    for axis, neighbors, fix in (
        (
            "pp",
            "pipeline neighbors",
            f"make {stage_product} a multiple of {{0}}, or {stage_product} x pp a divisor of {{0}}",
        ),
        ("dp", "data-parallel neighbors", f"make {replica_product} a multiple or a divisor of {{0}}"),
    ):
        if axis not in parts:
            continue
        links = site.links(parts[axis].source, parts[axis].target)
        remote_pairs = int((links >= FIRST_NETWORK_LINK).sum())
        crossing_pairs = int((links == 3).sum())
        if crossing_pairs:
            message = (
                f"{crossing_pairs} of {remote_pairs} pairs of {neighbors} on different nodes are on different rails"
            )
            yield PlacementFinding("bad" if axis == "pp" else "note", axis, message, fix=fix.format(site.nproc))
        elif remote_pairs:
            yield PlacementFinding("good", axis, f"{neighbors} on different nodes are on the same rail")


def _check_spine(parts: dict[str, TrafficMatrix], site: NodeLayout, cluster: ClusterSpec) -> Iterator[PlacementFinding]:
    """Yield a finding if an oversubscribed spine slows down the traffic that crosses it."""
    sums = [bytes_by_link(part, site) for part in parts.values()]
    rail_bytes, spine_bytes = (sum(row[link] for row in sums) for link in ("rail", "spine"))
    if not spine_bytes:
        return
    spine_share = spine_bytes / (rail_bytes + spine_bytes)
    slowdown = oversubscription_slowdown(spine_share, cluster.oversubscription)
    if slowdown > 1:
        message = f"{spine_share:.0%} of the network's bytes cross a spine of {cluster.oversubscription:g}:1"
        yield PlacementFinding(
            "bad",
            "spine",
            f"{message}: the network is {slowdown:.2f} times slower",
            fix="change the layout so that traffic stays on its rail",
        )

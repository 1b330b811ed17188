"""Where ranks sit, over which links their traffic goes, and what is badly placed.

Rank r is on node r // nproc and there on device r mod nproc. A rail is the network of the NICs of one number: those of
one rail reach each other over leaf switches, and from rail to rail it goes over the spine.
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
"""Kinds of ways between two ranks, nearest first: in a domain of fast links; in a node but not by them; between nodes
on one rail; and from rail to rail, over the spine."""
FIRST_NETWORK_LINK = 2
"""From this kind on it leaves the node."""
MAX_SHOWN_RANKS = 8
"""Ranks of a group that are named."""


@dataclass(frozen=True)
class NodeLayout:
    """What joins the devices: the same for every node. Of each device of a node:"""

    domain: tuple[int, ...]
    """Which of the node's groups with fast links it is in."""
    rail: tuple[int, ...]
    """Which rail its NICs are on."""
    nics: tuple[tuple[str, ...], ...]
    """The network devices nearest to it, which share its traffic."""
    span: int = 1
    """Nodes in sequence whose devices fast links join."""
    assumed: tuple[str, ...] = ()
    """What was not known, and is taken for granted."""

    @property
    def nproc(self) -> int:
        """Ranks on a node."""
        return len(self.domain)

    @property
    def ranks_per_island(self) -> int:
        """Ranks in sequence that are on one node, or on nodes that fast links join."""
        return self.nproc * self.span

    def domain_of(self, ranks: Ranks) -> Ranks:
        """A number for the fast domain of each rank."""
        domains: Ranks = ranks // self.ranks_per_island * self.nproc + np.take(
            np.array(self.domain), ranks % self.nproc
        )
        return domains

    def rail_of(self, ranks: Ranks) -> Ranks:
        """The rail of each rank."""
        rails: Ranks = np.take(np.array(self.rail), ranks % self.nproc)
        return rails

    def links(self, source: Ranks, target: Ranks) -> Ranks:
        """The kind of way between pairs of ranks, as a place in LINKS."""
        near = self.domain_of(source) == self.domain_of(target)
        same_node = source // self.nproc == target // self.nproc
        same = self.rail_of(source) == self.rail_of(target)
        return np.select([near, same_node, same], [0, 1, 2], 3)


def node_layout(cluster: ClusterSpec, nproc: int, topology: NodeTopology | None = None) -> NodeLayout:
    """The nodes of a cluster with so many ranks each, by its description and the topology of one node, if known.

    A preset's domain of up to 16 devices is inside a node, a larger one joins nodes. Raises UserError for more ranks
    than the topology has GPUs.
    """
    size = cluster.fast_link_domain or nproc
    beyond = size > nproc and (cluster.preset is None or size > MAX_NVLINK_GPUS_PER_NODE)
    domain = tuple(device // size for device in range(nproc))
    span = size // nproc if beyond else 1
    rail = tuple(range(nproc))
    nics: tuple[tuple[str, ...], ...] = tuple((f"nic{device}",) for device in rail)
    assumed = [] if cluster.fast_link_domain else [f"fast links join the {nproc} devices of a node"]
    if topology is None:
        return NodeLayout(
            domain,
            rail,
            nics,
            span=span,
            assumed=(*assumed, "every device has a NIC of its own, on a rail of its number"),
        )
    if nproc > len(topology.gpus):
        problem = f"is more than the {len(topology.gpus)} GPUs of the topology"
        raise UserError("--nproc", nproc, problem, fix=f"use {len(topology.gpus)} or fewer, or leave --topology out")
    if None not in topology.nvlinks and span == 1:
        assumed = []
        domain = tuple(next(i for i, d in enumerate(topology.nvlink_domains()) if gpu in d) for gpu in range(nproc))
    if not topology.nics:
        return NodeLayout(
            domain, rail, nics, span=span, assumed=(*assumed, "the topology lists no NIC: every device has its own")
        )
    nics = tuple(topology.nearest_nics(gpu) for gpu in range(nproc))
    return NodeLayout(domain, _assign_rails(topology, nics), nics, span=span, assumed=tuple(assumed))


def _assign_rails(topology: NodeTopology, nics: tuple[tuple[str, ...], ...]) -> tuple[int, ...]:
    """As NCCL numbers the rail of a device's first NIC; else devices with the same nearest NICs are on one rail."""
    numbered = dict(zip(topology.nics, topology.rails, strict=False))
    given = [numbered.get(local_nics[0]) for local_nics in nics]
    distinct = list(dict.fromkeys(nics))
    known = [rail for rail in given if rail is not None]
    return tuple(known) if len(known) == len(given) else tuple(distinct.index(local_nics) for local_nics in nics)


def with_pxn(matrix: TrafficMatrix, site: NodeLayout) -> TrafficMatrix:
    """The same as NCCL sends it since 2.12 (PXN: PCI x NVLink): what goes to another rail is first handed over fast
    links to a neighbour on that rail, if there is one, and leaves from there. Each of the two ways is counted."""
    first = {rail: device for device, rail in reversed(list(enumerate(site.rail)))}
    by = np.array([first[rail] for rail in site.rail])
    source = matrix.source
    target = matrix.target
    neighbour = source // site.nproc * site.nproc + by[target % site.nproc]
    hands = (site.links(source, target) == 3) & (neighbour < matrix.ranks)
    hands &= site.domain_of(source) == site.domain_of(neighbour)
    after = TrafficMatrix(matrix.ranks, np.where(hands, neighbour, source), target, bytes=matrix.bytes)
    return merge_matrices(
        matrix.ranks, [after, TrafficMatrix(matrix.ranks, source[hands], neighbour[hands], bytes=matrix.bytes[hands])]
    )


def bytes_by_link(matrix: TrafficMatrix, site: NodeLayout) -> dict[str, float]:
    """Bytes over each kind of way."""
    sums = np.bincount(site.links(matrix.source, matrix.target), matrix.bytes, len(LINK_KINDS))
    return dict(zip(LINK_KINDS, map(float, sums), strict=True))


@dataclass(frozen=True)
class NicLoad:
    """What one network device of a node carries in one optimizer update."""

    node: int
    nic: str
    sent_bytes: float
    received_bytes: float


def nic_loads(matrix: TrafficMatrix, site: NodeLayout) -> list[NicLoad]:
    """Of every network device that a rank is nearest to; a rank's traffic is shared evenly by those nearest to it."""
    names = list(dict.fromkeys(name for local_nics in site.nics for name in local_nics))
    share = np.array([[(name in local_nics) / len(local_nics) for name in names] for local_nics in site.nics])
    far = site.links(matrix.source, matrix.target) >= FIRST_NETWORK_LINK
    nodes = -(-matrix.ranks // site.nproc)

    def bytes_per_nic(ranks: Ranks) -> Sizes:
        rank_bytes = np.zeros(nodes * site.nproc)
        np.add.at(rank_bytes, ranks[far], matrix.bytes[far])
        found: Sizes = rank_bytes.reshape(nodes, site.nproc) @ share
        return found

    sent = bytes_per_nic(matrix.source)
    received = bytes_per_nic(matrix.target)
    return [
        NicLoad(node, name, float(sent[node, index]), received_bytes=float(received[node, index]))
        for node in range(nodes)
        for index, name in enumerate(names)
    ]


@dataclass(frozen=True)
class PlacementFinding:
    """Something that is well or badly placed."""

    verdict: Literal["good", "note", "bad"]
    axis: str
    said: str
    fix: str = ""


def placement_findings(
    sizes: ParallelDims, parts: dict[str, TrafficMatrix], site: NodeLayout, cluster: ClusterSpec
) -> list[PlacementFinding]:
    """What is well and what is badly placed, worst first."""
    findings = [*_check_domains(sizes, site), *_check_rails(sizes, parts, site), *_check_spine(parts, site, cluster)]
    if sizes.world_size % site.nproc:
        last = sizes.world_size % site.nproc
        message = f"the last node has {last} of {site.nproc} ranks: torchrun starts as many on every node"
        findings.append(PlacementFinding("bad", "nodes", message, fix=f"use a multiple of {site.nproc} ranks"))
    return sorted(findings, key=lambda finding: ["bad", "note", "good"].index(finding.verdict))


def _check_domains(sizes: ParallelDims, site: NodeLayout) -> Iterator[PlacementFinding]:
    """Ranks that talk in every layer belong inside a fast domain: those of a product must be, others should."""
    domain = int(np.bincount(site.domain_of(np.arange(site.ranks_per_island))).max())
    where = f"a fast domain ({plural(domain, 'device')})"
    advice = ' with layout.rank_order = "pipeline_outer"' if sizes.pp > 1 and not sizes.pipeline_outermost else ""
    for axis, found, fix in (
        ("tp", process_groups(sizes, "tp"), f"make layout.tp a divisor of {domain}"),
        ("cp", process_groups(sizes, "cp"), f"make layout.tp x layout.cp a divisor of {domain}"),
        ("ep", expert_parallel_groups(sizes), f"make layout.ep a divisor of {domain}{advice}"),
    ):
        if not found or len(found[0]) == 1:
            continue
        domains = site.domain_of(np.array(found))
        leaving = np.flatnonzero((domains != domains[:, :1]).any(1))
        if len(leaving):
            first = " ".join(map(str, found[leaving[0]][:MAX_SHOWN_RANKS])) + (
                " ..." if len(found[0]) > MAX_SHOWN_RANKS else ""
            )
            message = f"{len(leaving)} of {len(found)} {axis} groups leave {where}, the first: ranks {first}"
            yield PlacementFinding("bad" if axis == "tp" else "note", axis, message, fix=fix)
        else:
            yield PlacementFinding("good", axis, f"every {axis} group is inside {where}")


def _check_rails(sizes: ParallelDims, parts: dict[str, TrafficMatrix], site: NodeLayout) -> Iterator[PlacementFinding]:
    """Between nodes stages and data-parallel ranks should find their counterparts on the same rail."""
    stage, copy = ("dp x tp x cp", "tp x cp") if sizes.pipeline_outermost else ("tp x cp", "tp x cp x pp")
    for axis, pair, fix in (
        ("pp", "pipeline neighbours", f"make {stage} a multiple of {{0}}, or {stage} x pp a divisor of it"),
        ("dp", "data-parallel neighbours", f"make {copy} a multiple or a divisor of {{0}}"),
    ):
        if axis not in parts:
            continue
        links = site.links(parts[axis].source, parts[axis].target)
        remote_pairs = int((links >= FIRST_NETWORK_LINK).sum())
        crossing = int((links == 3).sum())
        if crossing:
            message = f"{crossing} of {remote_pairs} pairs of {pair} on different nodes are on different rails"
            yield PlacementFinding("bad" if axis == "pp" else "note", axis, message, fix=fix.format(site.nproc))
        elif remote_pairs:
            yield PlacementFinding("good", axis, f"{pair} on different nodes are on the same rail")


def _check_spine(parts: dict[str, TrafficMatrix], site: NodeLayout, cluster: ClusterSpec) -> Iterator[PlacementFinding]:
    """A thin spine slows down what crosses it."""
    sums = [bytes_by_link(part, site) for part in parts.values()]
    rail, spine = (sum(row[link] for row in sums) for link in ("rail", "spine"))
    slower = oversubscription_slowdown(spine / (rail + spine), cluster.oversubscription) if spine else 1.0
    if slower > 1:
        message = f"{spine / (rail + spine):.0%} of the network's bytes cross a spine of {cluster.oversubscription:g}:1"
        yield PlacementFinding(
            "bad", "spine", f"{message}: the network is {slower:.2f} times slower", fix="keep traffic on its rail"
        )

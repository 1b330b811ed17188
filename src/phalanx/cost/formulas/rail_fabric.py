"""Bytes that collectives send on a rail fabric through NICs, NVLink and the spine, and what a thin spine costs.

A rail fabric has n nodes of g devices, each with its own NIC; the NICs of all devices of the same number are on one
rail, whose switches they reach without the spine. N = n g ranks exchange buffers of S bytes each. All-reduces are
aligned with the rails: g rings or double trees, each for S/g, go from node to node between devices of one number only.
"""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.cost.argument_checks import require_at_least_one
from phalanx.cost.formulas.collectives import bus_factor
from phalanx.spec.errors import UserError


@dataclass(frozen=True)
class FabricLoad:
    """What one rank sends in one collective; where ranks differ, the one that sends most."""

    nic_bytes: float
    """Through its NIC, to other nodes."""
    nvlink_bytes: float
    """To other devices of its node."""
    spine_share: float
    """The part of `nic_bytes` that goes from rail to rail, through the spine."""


def all_to_all(size_bytes: float, nodes: int, devices_per_node: int, pxn: bool = True) -> FabricLoad:
    """Every rank sends 1/N of its S bytes to each other: S (n-1)/n leave the node.

    With `pxn` (NCCL 2.12: PCI x NVLink), what goes to another rail is handed over NVLink to the device on that rail
    first. Without it, it leaves by the sender's own NIC and crosses the spine, as (g-1)/g of all that leaves does.
    """
    require_at_least_one(nodes=nodes, devices_per_node=devices_per_node)
    remote_fraction = bus_factor("all_to_all", devices_per_node)
    return FabricLoad(
        nic_bytes=size_bytes * bus_factor("all_to_all", nodes),
        nvlink_bytes=size_bytes * remote_fraction / (1 if pxn else nodes),
        spine_share=remote_fraction if nodes > 1 and not pxn else 0.0,
    )


def flat_ring_all_reduce(size_bytes: float, nodes: int, devices_per_node: int) -> FabricLoad:
    """g rings over all N ranks: each rank sends 2 (N-1)/N of S/g in every ring, in one of them to another node."""
    require_at_least_one(nodes=nodes, devices_per_node=devices_per_node)
    hop = size_bytes / devices_per_node * bus_factor("all_reduce", nodes * devices_per_node)
    num_inside_hops = devices_per_node - 1 if nodes > 1 else devices_per_node
    return FabricLoad(nic_bytes=hop if nodes > 1 else 0.0, nvlink_bytes=hop * num_inside_hops, spine_share=0.0)


def hierarchical_all_reduce(size_bytes: float, nodes: int, devices_per_node: int) -> FabricLoad:
    """A reduce-scatter in each node, an all-reduce of S/g along each rail, and an all-gather in each node.

    NICs send 2 (n-1)/(n g) S (BlueConnect, Cho et al., MLSys 2019). Those of `flat_ring_all_reduce` send more by
    (N-1)/N over (n-1)/n: 1.875 x on 2 nodes of 8, 1.06 x on 16.
    """
    require_at_least_one(nodes=nodes, devices_per_node=devices_per_node)
    return FabricLoad(
        nic_bytes=size_bytes / devices_per_node * bus_factor("all_reduce", nodes),
        nvlink_bytes=size_bytes * bus_factor("all_reduce", devices_per_node),
        spine_share=0.0,
    )


def double_tree_all_reduce(size_bytes: float, nodes: int, devices_per_node: int) -> FabricLoad:
    """Two trees over the nodes on every rail, each with half of the rail's S/g; in nodes, chains up and down.

    A node is a leaf in one tree and has at most two children in the other (Sanders, Speck & Träff, Parallel Computing
    35, 2009): of the half it sends one copy up as a leaf, and otherwise one up and two down. `nic_bytes` is that most,
    2 S/g; it may be less.
    """
    require_at_least_one(nodes=nodes, devices_per_node=devices_per_node)
    return FabricLoad(
        nic_bytes=2 * size_bytes / devices_per_node if nodes > 1 else 0.0,
        nvlink_bytes=size_bytes * bus_factor("all_reduce", devices_per_node),
        spine_share=0.0,
    )


def oversubscription_slowdown(spine_share: float, oversubscription: float) -> float:
    """How many times longer an exchange takes whose `spine_share` goes through a spine with 1/o of the NICs' bandwidth.

    max(1, o x share): the spine is the bottleneck as soon as it needs longer than the NICs.
    """
    if not oversubscription >= 1:
        raise UserError(
            "oversubscription", oversubscription, "is o in o:1", fix="give 1 for a spine as fast as all NICs"
        )
    if not 0 <= spine_share <= 1:
        raise UserError("spine_share", spine_share, "is a part of the bytes", fix="give a number from 0 to 1")
    return max(1.0, oversubscription * spine_share)


def network_seconds(load: FabricLoad, nic_bytes_per_second: float, oversubscription: float = 1.0) -> float:
    """Time that the NICs or the spine need for `load`, whichever is slower, without latencies."""
    return load.nic_bytes / nic_bytes_per_second * oversubscription_slowdown(load.spine_share, oversubscription)

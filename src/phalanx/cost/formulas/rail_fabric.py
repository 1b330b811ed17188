"""Bytes that collectives send on a rail fabric, and the slowdown of an oversubscribed spine.

A rail fabric has n nodes of g devices, each with its own NIC. The NICs of all devices with the same local index are on
one rail and reach each other through its switches, without the spine. N = n g ranks exchange buffers of S bytes each.
All-reduces follow the rails: g rings or double trees, each for S/g, connect devices with the same local index.
"""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.cost.argument_checks import require_at_least_one
from phalanx.cost.formulas.collectives import bus_factor
from phalanx.spec.errors import UserError


@dataclass(frozen=True)
class FabricLoad:
    """Bytes that one rank sends in one collective; the maximum where ranks differ."""

    nic_bytes: float
    """Bytes through its NIC to other nodes."""
    nvlink_bytes: float
    """Bytes to other devices of its node."""
    spine_share: float
    """Fraction of `nic_bytes` that crosses the spine to another rail."""


def all_to_all(size_bytes: float, nodes: int, devices_per_node: int, pxn: bool = True) -> FabricLoad:
    """Return the load of an all-to-all, in which S (n-1)/n of each rank's S bytes leave the node.

    Args:
        size_bytes: Bytes of each rank's buffer, S.
        nodes: Number of nodes, n.
        devices_per_node: Devices per node, g.
        pxn: True if bytes for another rail first go over NVLink to the device on that rail (NCCL 2.12: PCI x NVLink).
            Otherwise they leave through the sender's own NIC, and (g-1)/g of the bytes that leave cross the spine.
    """
    require_at_least_one(nodes=nodes, devices_per_node=devices_per_node)
    remote_fraction = bus_factor("all_to_all", devices_per_node)
    return FabricLoad(
        nic_bytes=size_bytes * bus_factor("all_to_all", nodes),
        nvlink_bytes=size_bytes * remote_fraction / (1 if pxn else nodes),
        spine_share=remote_fraction if nodes > 1 and not pxn else 0.0,
    )


def flat_ring_all_reduce(size_bytes: float, nodes: int, devices_per_node: int) -> FabricLoad:
    """Return the load of g ring all-reduces over all N ranks.

    Each rank sends 2 (N-1)/N of S/g in every ring, and sends to another node in one of the rings.

    Args:
        size_bytes: Bytes of each rank's buffer, S.
        nodes: Number of nodes, n.
        devices_per_node: Devices per node, g.
    """
    require_at_least_one(nodes=nodes, devices_per_node=devices_per_node)
    hop = size_bytes / devices_per_node * bus_factor("all_reduce", nodes * devices_per_node)
    num_inside_hops = devices_per_node - 1 if nodes > 1 else devices_per_node
    return FabricLoad(nic_bytes=hop if nodes > 1 else 0.0, nvlink_bytes=hop * num_inside_hops, spine_share=0.0)


def hierarchical_all_reduce(size_bytes: float, nodes: int, devices_per_node: int) -> FabricLoad:
    """Return the load of reduce-scatter per node, all-reduce of S/g per rail, and all-gather per node.

    NICs send 2 (n-1)/(n g) S (BlueConnect, Cho et al., MLSys 2019). In `flat_ring_all_reduce` they send more by the
    factor (N-1)/N over (n-1)/n: 1.875 on 2 nodes of 8 devices, 1.06 on 16.

    Args:
        size_bytes: Bytes of each rank's buffer, S.
        nodes: Number of nodes, n.
        devices_per_node: Devices per node, g.
    """
    require_at_least_one(nodes=nodes, devices_per_node=devices_per_node)
    return FabricLoad(
        nic_bytes=size_bytes / devices_per_node * bus_factor("all_reduce", nodes),
        nvlink_bytes=size_bytes * bus_factor("all_reduce", devices_per_node),
        spine_share=0.0,
    )


def double_tree_all_reduce(size_bytes: float, nodes: int, devices_per_node: int) -> FabricLoad:
    """Return the load of an all-reduce by two trees per rail over the nodes, each for half of S/g.

    Inside a node the devices form chains, up and down. A node is a leaf in one tree and has at most two children in the
    other (Sanders, Speck & Träff, Parallel Computing 35, 2009). It sends one copy of the half up as a leaf, and
    otherwise one copy up and two down. `nic_bytes` is this maximum, 2 S/g.

    Args:
        size_bytes: Bytes of each rank's buffer, S.
        nodes: Number of nodes, n.
        devices_per_node: Devices per node, g.
    """
    require_at_least_one(nodes=nodes, devices_per_node=devices_per_node)
    return FabricLoad(
        nic_bytes=2 * size_bytes / devices_per_node if nodes > 1 else 0.0,
        nvlink_bytes=size_bytes * bus_factor("all_reduce", devices_per_node),
        spine_share=0.0,
    )


def oversubscription_slowdown(spine_share: float, oversubscription: float) -> float:
    """Return the slowdown by a spine with 1/o of the NICs' bandwidth: max(1, o x share).

    The spine is the bottleneck once it takes longer than the NICs. The share is `spine_share` and o is
    `oversubscription`.
    """
    if not oversubscription >= 1:
        problem = "must be at least 1, the value of a spine as fast as all NICs"
        fix = "use 2 for an oversubscription of 2:1"
        raise UserError("oversubscription", oversubscription, problem, fix)
    if not 0 <= spine_share <= 1:
        raise UserError("spine_share", spine_share, "is not a fraction of the bytes", fix="use a number from 0 to 1")
    return max(1.0, oversubscription * spine_share)


def network_seconds(load: FabricLoad, nic_bytes_per_second: float, oversubscription: float = 1.0) -> float:
    """Return the seconds that the slower of NICs and spine needs for a load, without latencies.

    Args:
        load: Bytes of one collective.
        nic_bytes_per_second: Bandwidth of a NIC in one direction.
        oversubscription: o of a spine with 1/o of the NICs' bandwidth; at least 1.
    """
    return load.nic_bytes / nic_bytes_per_second * oversubscription_slowdown(load.spine_share, oversubscription)

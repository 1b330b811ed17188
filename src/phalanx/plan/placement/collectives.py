"""Load on a rail fabric and NCCL latency of collectives over all ranks of a run, by published formulas."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import get_args

from phalanx.cost.formulas.nccl import Algorithm, Protocol, all_reduce_latency_seconds
from phalanx.cost.formulas.rail_fabric import (
    FabricLoad,
    all_to_all,
    double_tree_all_reduce,
    flat_ring_all_reduce,
    hierarchical_all_reduce,
    network_seconds,
)
from phalanx.plan.placement.findings import NodeLayout

COLLECTIVES: dict[str, Callable[[float, int, int], FabricLoad]] = {
    "all-reduce, flat rings": flat_ring_all_reduce,
    "all-reduce, hierarchical": hierarchical_all_reduce,
    "all-reduce, double trees": double_tree_all_reduce,
    "all-to-all, direct": partial(all_to_all, pxn=False),
    "all-to-all, PXN": all_to_all,
}
BUFFER_BYTES = 1e9
"""Buffer of each rank in the collectives of the table."""


def fabric_loads(
    world_size: int, site: NodeLayout, nic_bytes_per_second: float | None, oversubscription: float
) -> dict[str, dict[str, float | None]]:
    """Return the bytes that a rank sends per collective over all ranks, and the network's seconds.

    The slower of NIC and spine determines the seconds. The result is empty unless ranks fill two or more nodes and
    every device of a node has a rail of its own.
    """
    if world_size % site.nproc or world_size == site.nproc or len(set(site.rail)) < site.nproc:
        return {}
    loads = {name: load(BUFFER_BYTES, world_size // site.nproc, site.nproc) for name, load in COLLECTIVES.items()}
    return {
        name: asdict(load)
        | {"seconds": network_seconds(load, nic_bytes_per_second, oversubscription) if nic_bytes_per_second else None}
        for name, load in loads.items()
    }


def nccl_latencies(world_size: int, site: NodeLayout) -> dict[str, dict[str, float]]:
    """Return NCCL's estimate of a small all-reduce in seconds, by algorithm and protocol, on Intel hosts.

    The result is empty for cases outside the model: one rank, a partly filled last node, and fast links between nodes.
    """
    ranks_per_node = min(world_size, site.nproc)
    if world_size == 1 or world_size % ranks_per_node or site.span > 1:
        return {}
    latency = partial(
        all_reduce_latency_seconds,
        nodes=world_size // ranks_per_node,
        ranks_per_node=ranks_per_node,
        link="nvlink" if len(set(site.domain[:ranks_per_node])) == 1 else "pci",
    )
    return {
        algorithm: {protocol: latency(algorithm, protocol) for protocol in get_args(Protocol)}
        for algorithm in get_args(Algorithm)
    }

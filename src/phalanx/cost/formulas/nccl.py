"""Latencies that NCCL's tuning model expects of an all-reduce.

The constants are those of NVIDIA/nccl 2.30, src/graph/tuning.cc: orders of magnitude, not measurements.
"""

from __future__ import annotations

from typing import Literal

from phalanx.cost.argument_checks import require_at_least_one
from phalanx.cost.formulas.collectives import ring_steps

Algorithm = Literal["ring", "tree"]
Protocol = Literal["LL", "LL128", "Simple"]
"""How receivers learn that data is there: a flag with every 4 B (LL), every 120 B (LL128), or a wait per chunk."""
Link = Literal["nvlink", "pci"]
"""Between the GPUs of a node."""
Cpu = Literal["intel", "amd"]

_ByProtocol = dict[Protocol, float]

BASE_MICROSECONDS: dict[Algorithm, _ByProtocol] = {
    "tree": {"LL": 6.8, "LL128": 14.0, "Simple": 8.4},
    "ring": {"LL": 6.6, "LL128": 14.0, "Simple": 8.4},
}
"""To start at all."""
HOP_MICROSECONDS: dict[Link | Literal["net"], dict[Algorithm, _ByProtocol]] = {
    "nvlink": {
        "tree": {"LL": 0.6, "LL128": 1.25, "Simple": 4.0},
        "ring": {"LL": 0.6, "LL128": 1.9, "Simple": 3.4},
    },
    "pci": {
        "tree": {"LL": 1.0, "LL128": 1.9, "Simple": 4.0},
        "ring": {"LL": 1.0, "LL128": 2.5, "Simple": 5.7},
    },
    "net": {
        "tree": {"LL": 5.0, "LL128": 8.5, "Simple": 14.0},
        "ring": {"LL": 2.7, "LL128": 4.0, "Simple": 14.0},
    },
}
"""From one rank to the next."""
NET_OVERHEAD_MICROSECONDS: dict[Cpu, float] = {"intel": 1.0, "amd": 2.0}
"""For the host to post a message: the least a ring's step takes where nodes are several, 3 x as much with Simple."""


def all_reduce_latency_seconds(
    algorithm: Algorithm,
    protocol: Protocol,
    nodes: int,
    ranks_per_node: int,
    *,
    link: Link = "nvlink",
    cpu: Cpu = "intel",
) -> float:
    """Time of an all-reduce of next to nothing.

        ring: base + (2 (N - 1) - 2 (n - 1)) max(hop in a node, net overhead) + 2 (n - 1) hop between nodes
        tree: base + 2 ((ranks per node - 1) hop in a node + floor(log2 n) hop between nodes)

    with N ranks on n nodes. Where each has one rank only, a ring's hop between nodes takes as long as a tree's.
    """
    require_at_least_one(nodes=nodes, ranks_per_node=ranks_per_node)
    hop_in_node = HOP_MICROSECONDS[link][algorithm][protocol]
    hop_between_nodes = HOP_MICROSECONDS["net"]["tree" if ranks_per_node == 1 else algorithm][protocol]
    base = BASE_MICROSECONDS[algorithm][protocol]
    if algorithm == "tree":
        return 1e-6 * (base + 2 * ((ranks_per_node - 1) * hop_in_node + (nodes.bit_length() - 1) * hop_between_nodes))
    if nodes > 1:
        hop_in_node = max(hop_in_node, NET_OVERHEAD_MICROSECONDS[cpu] * (3 if protocol == "Simple" else 1))
    steps_between_nodes = ring_steps("all_reduce", nodes)
    return 1e-6 * (
        base
        + (ring_steps("all_reduce", nodes * ranks_per_node) - steps_between_nodes) * hop_in_node
        + steps_between_nodes * hop_between_nodes
    )

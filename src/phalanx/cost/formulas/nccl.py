"""All-reduce latencies of NCCL's tuning model.

The constants are those of NVIDIA/nccl 2.30, src/graph/tuning.cc: orders of magnitude, not measurements.
"""

from __future__ import annotations

from typing import Literal

from phalanx.cost.argument_checks import require_at_least_one
from phalanx.cost.formulas.collectives import ring_steps

Algorithm = Literal["ring", "tree"]
Protocol = Literal["LL", "LL128", "Simple"]
"""Arrival signal of data: a flag per 4 B (LL) or per 120 B (LL128), or a wait per chunk (Simple)."""
Link = Literal["nvlink", "pci"]
"""Link between the GPUs of a node."""
Cpu = Literal["intel", "amd"]

_ByProtocol = dict[Protocol, float]

BASE_MICROSECONDS: dict[Algorithm, _ByProtocol] = {
    "tree": {"LL": 6.8, "LL128": 14.0, "Simple": 8.4},
    "ring": {"LL": 6.6, "LL128": 14.0, "Simple": 8.4},
}
"""Fixed latency of a collective."""
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
"""Latency from one rank to the next."""
NET_OVERHEAD_MICROSECONDS: dict[Cpu, float] = {"intel": 1.0, "amd": 2.0}
"""Time in which the host posts a message.

It is the minimum of a ring step over several nodes, and counts 3 times with Simple.
"""


def all_reduce_latency_seconds(
    algorithm: Algorithm,
    protocol: Protocol,
    nodes: int,
    ranks_per_node: int,
    *,
    link: Link = "nvlink",
    cpu: Cpu = "intel",
) -> float:
    """Return the latency of an all-reduce of almost zero bytes.

        ring: base + (2 (N - 1) - 2 (n - 1)) max(hop in a node, net overhead) + 2 (n - 1) hop between nodes
        tree: base + 2 ((ranks per node - 1) hop in a node + floor(log2 n) hop between nodes)

    N is the number of ranks and n the number of nodes. With one rank per node, a ring's hop between nodes takes as long
    as a tree's.

    Args:
        algorithm: Ring or tree.
        protocol: Protocol, which determines the latency of a hop.
        nodes: Number of nodes, n.
        ranks_per_node: Ranks of the group on each node, N / n.
        link: Link between the GPUs of a node.
        cpu: Vendor of the CPUs, which determines the time to post a message to another node.
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

"""What NCCL itself expects of an all-reduce: the latencies and bandwidths by which it chooses its algorithm.

The constants are those of NVIDIA/nccl 2.30, src/graph/tuning.cc. Left out are that model's limits per channel and its
corrections of trees by size: it is for orders of magnitude, and no measurement.
"""

from __future__ import annotations

from typing import Literal

from phalanx.cost.argument_checks import require_at_least_one
from phalanx.cost.formulas.collectives import ring_steps
from phalanx.spec.errors import UserError

Algorithm = Literal["ring", "tree"]
Protocol = Literal["LL", "LL128", "Simple"]
"""How receivers learn that data is there: a flag with every 4 B (LL), every 120 B (LL128), or a wait per chunk."""
Link = Literal["nvlink", "pci"]
"""Between the GPUs of a node."""
Cpu = Literal["intel", "amd"]
Generation = Literal["ampere", "hopper", "blackwell"]

_By = dict[Protocol, float]

BASE_MICROSECONDS: dict[Algorithm, _By] = {
    "tree": {"LL": 6.8, "LL128": 14.0, "Simple": 8.4},
    "ring": {"LL": 6.6, "LL128": 14.0, "Simple": 8.4},
}
"""To start at all."""
HOP_MICROSECONDS: dict[Link | Literal["net"], dict[Algorithm, _By]] = {
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
PLATEAU = 1.4
"""A ring across nodes is so much later with Simple, once a message is 64 B or more per channel and rank."""

LINK_BYTES_PER_SECOND: dict[Generation, float] = {"ampere": 20e9, "hopper": 20.6e9, "blackwell": 40.1e9}
"""One NVLink, one way: an A100 has 12, an H100 18."""
LL_BYTES_PER_SECOND: dict[Generation, float] = {"ampere": 87.7e9, "hopper": 141e9, "blackwell": 282e9}
"""The most that LL moves in one node."""


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


def all_reduce_bytes_per_second(
    algorithm: Algorithm,
    protocol: Protocol,
    nodes: int,
    ranks_per_node: int,
    bus_bytes_per_second: float,
    generation: Generation | None = None,
) -> float:
    """Speed of reducing a large buffer (algbw), where the slowest links on the way carry `bus_bytes_per_second`.

    Flags leave 1/2 of the bus to LL in a ring, less in a tree, and .92 to LL128; a tree reaches .92 of it. A ring sends
    2 (N-1)/N of the buffer through every link, a tree 2 x the whole. In one node, `generation` tells the most of LL.
    """
    require_at_least_one(nodes=nodes, ranks_per_node=ranks_per_node)
    if nodes * ranks_per_node == 1:
        raise UserError("ranks", 1, "has nobody to exchange with", "give two ranks or more")
    shares: _By = {"LL": 1 / 2, "LL128": 0.92, "Simple": 1.0}
    if algorithm == "tree":
        shares = {"LL": 0.92 / 3.8, "LL128": 0.92 * (7 / 9 if nodes == 1 else 120 / 128), "Simple": 0.92}
    bus = bus_bytes_per_second * shares[protocol]
    if protocol == "LL" and nodes == 1 and generation is not None:
        bus = min(bus, LL_BYTES_PER_SECOND[generation])
    ranks = nodes * ranks_per_node
    return bus * (ranks / ring_steps("all_reduce", ranks) if algorithm == "ring" else 1 / 2)


def all_reduce_seconds(
    size_bytes: float,
    algorithm: Algorithm,
    protocol: Protocol,
    nodes: int,
    ranks_per_node: int,
    bus_bytes_per_second: float,
    *,
    channels: int,
    generation: Generation | None = None,
    link: Link = "nvlink",
    cpu: Cpu = "intel",
) -> float:
    """Latency, longer on a ring's plateau, and the buffer's bytes over the bandwidth, as NCCL adds them."""
    latency = all_reduce_latency_seconds(algorithm, protocol, nodes, ranks_per_node, link=link, cpu=cpu)
    speed = all_reduce_bytes_per_second(algorithm, protocol, nodes, ranks_per_node, bus_bytes_per_second, generation)
    is_long = size_bytes >= 64 * channels * nodes * ranks_per_node
    if algorithm == "ring" and protocol == "Simple" and nodes > 1 and is_long:
        latency *= PLATEAU
    return latency + size_bytes / speed

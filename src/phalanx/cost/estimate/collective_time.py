"""Time of collectives: latency and bandwidth over the hierarchy of fast links and network cards.

All functions compute columns of many jobs at once (`cost.estimate.job_table`).
"""

from __future__ import annotations

import numpy as np

from phalanx.cost.estimate.constants import TimeConstants
from phalanx.cost.estimate.job_table import JobTable
from phalanx.cost.kinds import Column

MAX_LOCAL_TREE_HOPS = 7
"""Maximum number of hops of a tree within a node, where it is a chain of at most eight GPUs."""
LOCAL_RING_HOP_FRACTION = 0.3
"""Part of the latency of a hop within a node that a ring between nodes does not hide; chosen with the first fit to
published runs."""


def fast_link_bandwidth(constants: TimeConstants, jobs: JobTable) -> Column:
    """Return the bytes per second of one device's fast links that collectives reach."""
    return jobs.link_bytes_per_second * constants.of_generation("link", jobs.hardware_generation, constants.link)


def network_bandwidth(constants: TimeConstants, jobs: JobTable) -> Column:
    """Return the bytes per second of one device's share of the network that collectives reach."""
    return jobs.network_bytes_per_second * constants.network / jobs.oversubscription


def ring_seconds(
    constants: TimeConstants,
    jobs: JobTable,
    size_bytes: Column,
    ranks: Column,
    stride: Column | float,
    all_reduce: bool = False,
    calls: Column | float = 1.0,
    neighbor_sends: bool = False,
) -> Column:
    """Return the seconds of all-gathers, reduce-scatters or all-reduces within a stage.

    Each rank sends (N-1)/N of the bytes, twice in an all-reduce (nccl-tests, doc/PERFORMANCE.md). If a group spans
    several domains, the network cards of its members in a node serve it together. Every step of a ring waits for the
    previous one. Between nodes, an `all_reduce` uses trees (NCCL, src/graph/tuning.cc). Messages from each rank to the
    next (`neighbor_sends`) use only the card of the rank whose successor is in another node.

    `size_bytes` is the total of all `calls`, and `stride` the distance between the ranks of the group within the stage.
    """
    ranks_in_domain = np.clip(jobs.fast_link_ranks_per_stage / stride, 1, ranks)
    num_domains = ranks / ranks_in_domain
    leaves_domain = ranks * stride > jobs.fast_link_ranks_per_stage
    cards = 1.0 if neighbor_sends else ranks_in_domain
    bytes_per_second = np.where(
        leaves_domain,
        np.minimum(fast_link_bandwidth(constants, jobs), cards * network_bandwidth(constants, jobs)),
        fast_link_bandwidth(constants, jobs),
    )
    if all_reduce:
        tree_hops = 2 * constants.network_hop_seconds * np.log2(np.maximum(num_domains, 1))
        hops_seconds = tree_hops + constants.hop_seconds * np.minimum(ranks_in_domain - 1, MAX_LOCAL_TREE_HOPS)
    else:
        ring_hops = constants.network_hop_seconds * (num_domains - 1)
        hops_seconds = ring_hops + constants.hop_seconds * (ranks - num_domains) * LOCAL_RING_HOP_FRACTION
    latency_seconds = np.where(
        leaves_domain,
        constants.network_seconds + hops_seconds,
        constants.link_seconds + constants.hop_seconds * (ranks - 1),
    )
    transfer_seconds = (2 if all_reduce else 1) * (ranks - 1) / ranks * size_bytes / bytes_per_second
    return np.where(ranks > 1, transfer_seconds + calls * latency_seconds, 0.0)


def all_to_all_seconds(
    constants: TimeConstants,
    jobs: JobTable,
    size_bytes: Column,
    ranks: Column,
    stride: Column | float = 1.0,
    calls: float = 1.0,
    relayed_fraction: Column | float = 1.0,
) -> Column:
    """Return the seconds of all-to-alls within a stage.

    A rank's own network card sends what leaves the domain, since all ranks of a node send equally much. `size_bytes` is
    the total on each rank, evenly for all ranks, including its own part. If nodes relay, `relayed_fraction` of the
    bytes for other nodes crosses the network, and fast links forward all bytes.
    """
    ranks_in_domain = np.clip(jobs.fast_link_ranks_per_stage / stride, 1, ranks)
    remote_bytes = size_bytes * (ranks - ranks_in_domain) / ranks
    local_bytes = size_bytes * (ranks_in_domain - 1) / np.where(jobs.dedup_node_dispatch > 0, ranks_in_domain, ranks)
    network_seconds = relayed_fraction * remote_bytes / network_bandwidth(constants, jobs)
    fast_link_seconds = local_bytes / fast_link_bandwidth(constants, jobs)
    latency_seconds = constants.link_seconds + np.where(ranks > ranks_in_domain, constants.network_seconds, 0.0)
    return np.where(ranks > 1, calls * latency_seconds + np.maximum(network_seconds, fast_link_seconds), 0.0)


def expert_all_to_all_seconds(constants: TimeConstants, jobs: JobTable, size_bytes: Column) -> Column:
    """Return the seconds in which expert-parallel ranks exchange tokens, evenly with all.

    Experts are not split: expert-parallel ranks are neighbors, whatever tensor parallelism is. Relayed tokens cross to
    a node once, however many of their experts are there. Of n nodes, k randomly drawn experts are on n (1 - (1 -
    1/n)^k). `size_bytes` includes the tokens for a rank's own experts.
    """
    num_domains = jobs.ep / np.clip(jobs.fast_link_ranks_per_stage, 1, jobs.ep)
    top_k = np.maximum(jobs.top_k, 1)
    distinct_fraction = np.minimum(num_domains * (1 - (1 - 1 / num_domains) ** top_k) / top_k, 1.0)
    relayed_fraction = np.where(jobs.dedup_node_dispatch > 0, distinct_fraction, 1.0)
    return all_to_all_seconds(constants, jobs, size_bytes, jobs.ep, relayed_fraction=relayed_fraction)


def p2p_seconds(constants: TimeConstants, jobs: JobTable, size_bytes: Column) -> Column:
    """Return the seconds of one message to the next stage, which is in another node unless all share a domain."""
    stage_stride = jobs.tp * jobs.cp * np.where(jobs.pipeline_outermost > 0, jobs.dp, 1)
    # Stages that are closer than half a domain mostly have their neighbor in the same domain.
    leaves_domain = (stage_stride * jobs.pp > jobs.fast_link_domain) & (2 * stage_stride >= jobs.fast_link_domain)
    fast_link_seconds = constants.link_seconds + size_bytes / fast_link_bandwidth(constants, jobs)
    network_seconds = constants.network_seconds + size_bytes / network_bandwidth(constants, jobs)
    return np.where(leaves_domain, network_seconds, fast_link_seconds)

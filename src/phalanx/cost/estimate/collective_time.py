"""How long collectives take: latency and bandwidth over the hierarchy of fast links and network cards. Columns of many
jobs at once (`cost.jobs`)."""

from __future__ import annotations

import numpy as np

from phalanx.cost.estimate.constants import TimeConstants
from phalanx.cost.estimate.job_table import JobTable
from phalanx.cost.kinds import Column


def fast_link_bandwidth(c: TimeConstants, jobs: JobTable) -> Column:
    """Bytes per second of one device's fast links, as collectives reach them."""
    return jobs.link_bytes_per_second * np.where(jobs.hardware_generation > 1, c.link_2, c.link)


def network_bandwidth(c: TimeConstants, jobs: JobTable) -> Column:
    """Bytes per second of one device's share of the network, as collectives reach it."""
    return jobs.network_bytes_per_second * c.network / jobs.oversubscription


def ring_seconds(
    c: TimeConstants,
    jobs: JobTable,
    size_bytes: Column,
    ranks: Column,
    stride: Column | float,
    reduces: bool = False,
    calls: Column | float = 1.0,
) -> Column:
    """Seconds of `calls` collectives of `size_bytes` in all over `ranks` of a stage that are `stride` apart:
    all-gathers or reduce-scatters, or with `reduces` all-reduces.

    Each rank sends (N-1)/N of the bytes, twice in an all-reduce (nccl-tests, doc/PERFORMANCE.md). Where a group leaves
    its domain, the network cards of its members in a node serve it together. Every step of a ring waits for the one
    before it; all-reduces go by trees between nodes (NCCL, src/graph/tuning.cc).
    """
    inside = np.clip(jobs.fast_link_ranks_per_stage / stride, 1, ranks)
    nodes = ranks / inside
    leaves = ranks * stride > jobs.fast_link_ranks_per_stage
    speed = np.where(
        leaves,
        np.minimum(fast_link_bandwidth(c, jobs), inside * network_bandwidth(c, jobs)),
        fast_link_bandwidth(c, jobs),
    )
    if reduces:
        steps = 2 * c.network_hop_seconds * np.log2(np.maximum(nodes, 1)) + c.hop_seconds * np.minimum(inside - 1, 7)
    else:
        steps = c.network_hop_seconds * (nodes - 1) + c.hop_seconds * (ranks - nodes) * 0.3
    latency = np.where(leaves, c.network_seconds + steps, c.link_seconds + c.hop_seconds * (ranks - 1))
    moved = (2 if reduces else 1) * (ranks - 1) / ranks * size_bytes / speed
    return np.where(ranks > 1, moved + calls * latency, 0.0)


def all_to_all_seconds(c: TimeConstants, jobs: JobTable, size_bytes: Column) -> Column:
    """Seconds in which each expert-parallel rank sends `size_bytes` of tokens, evenly to all.

    Experts are not split: expert-parallel ranks lie beside one another, whatever tensor parallelism is. What leaves the
    node goes by the rank's own network card. Relayed tokens cross once to a node, however many of their
    experts are there: of n nodes, k experts drawn at random are on n (1 - (1 - 1/n)^k).
    """
    ranks = jobs.ep
    inside = np.clip(jobs.fast_link_ranks_per_stage, 1, ranks)
    nodes, top_k = ranks / inside, np.maximum(jobs.top_k, 1)
    distinct = np.minimum(nodes * (1 - (1 - 1 / nodes) ** top_k) / top_k, 1.0)
    far = (
        size_bytes
        * (ranks - inside)
        / ranks
        * np.where(jobs.dedup_node_dispatch > 0, distinct, 1.0)
        / network_bandwidth(c, jobs)
    )
    near = size_bytes * (inside - 1) / inside / fast_link_bandwidth(c, jobs)
    latency = c.link_seconds + np.where(ranks > inside, c.network_seconds, 0.0)
    return np.where(ranks > 1, latency + np.maximum(far, near), 0.0)


def p2p_seconds(c: TimeConstants, jobs: JobTable, size_bytes: Column) -> Column:
    """Seconds of one message to the next stage, which is in another node unless all stages share a domain."""
    apart = jobs.tp * jobs.cp * np.where(jobs.pipeline_outermost > 0, jobs.dp, 1)
    leaves = (apart * jobs.pp > jobs.fast_link_domain) & (2 * apart >= jobs.fast_link_domain)
    near = c.link_seconds + size_bytes / fast_link_bandwidth(c, jobs)
    return np.where(leaves, c.network_seconds + size_bytes / network_bandwidth(c, jobs), near)

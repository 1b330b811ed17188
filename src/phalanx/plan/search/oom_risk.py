"""Probability that memory is insufficient for a rank's exact bytes, and its limits."""

from __future__ import annotations

from collections.abc import Collection
from math import exp
from statistics import NormalDist

import numpy as np

from phalanx.cost.estimate.memory import exceedance_probability
from phalanx.cost.exact.cuda_process import CONTEXT_BYTES
from phalanx.cost.exact.rank_memory import RankMemory
from phalanx.plan.tables.job_columns import memory_constants_for
from phalanx.plan.tables.machine_columns import host_memory
from phalanx.spec.cluster import ClusterSpec
from phalanx.spec.formatting import GIB, format_bytes, format_gib, plural

MAX_OOM_PROBABILITY = 0.2
"""Maximum P(OOM) of an offered layout, which is shown with it.

On published sweeps of one source, the fastest layouts that ran almost filled the memory: first choices are 3.0 % slower
than the best, but 4.7 % with 0.05. On another source, 9 of 16 best layouts are among the first three choices, but 10
with 0.05.
"""
SAFE_OOM_PROBABILITY = 0.05
"""P(OOM) below which a layout is chosen, or reported to fit, without mention of the probability."""


def device_and_host_bytes(cluster: ClusterSpec, memories: Collection[RankMemory]) -> tuple[float, float]:
    """Return the maximum bytes of a rank on its device, and in CPU memory (`RankMemory.host`).

    If CPUs compute, the device bytes contain both. Calibration can have shown that communication buffers exceed their
    count.
    """
    host = max(rank_memory.host for rank_memory in memories)
    buffer_overhead = cluster.calibration.buffer_overhead if cluster.calibration else 0.0
    device = max(rank_memory.device + buffer_overhead * rank_memory.communication for rank_memory in memories)
    return float(device + (host if cluster.uses_cpu else 0)), float(host)


def layout_oom_probability(cluster: ClusterSpec, held_bytes: float, host_bytes: float) -> float:
    """Return the probability that memory is insufficient for a rank."""
    used = np.array([process_bytes(cluster, held_bytes), max(host_bytes, 1)])
    available = np.array([float(cluster.rank_memory_bytes or 1), host_memory(cluster)])
    return float(exceedance_probability(memory_constants_for(cluster), used, available).max())


def ranks_oom_probability(cluster: ClusterSpec, memories: Collection[RankMemory]) -> float:
    """Return the probability that memory is insufficient for the fullest of several ranks."""
    return layout_oom_probability(cluster, *device_and_host_bytes(cluster, memories))


def describe_fit(p_oom: float) -> str:
    """Return a text that says whether a layout fits; `phalanx plan` offers those that may not fit."""
    if p_oom >= MAX_OOM_PROBABILITY:
        return "does not fit"
    return "fits" if p_oom < SAFE_OOM_PROBABILITY else f"may not fit (P(OOM) {p_oom:.0%})"


def safe_capacity_bytes(cluster: ClusterSpec) -> float:
    """Return the maximum bytes of a rank's tensors with which memory is almost certainly sufficient."""
    enough = enough_bytes(cluster, cluster.rank_memory_bytes or 0, SAFE_OOM_PROBABILITY)
    return max(0.0, enough - process_bytes(cluster, 0)) / bytes_per_counted_byte(cluster)


def enough_bytes(cluster: ClusterSpec, memory_bytes: float, max_probability: float) -> float:
    """Return the maximum predicted bytes in a memory at which P(OOM) is at most `max_probability`."""
    return memory_bytes * exp(memory_constants_for(cluster).spread * NormalDist().inv_cdf(max_probability))


def describe_memory_limit(cluster: ClusterSpec) -> str:
    """Return one sentence on the device memory available to tensors, and the purpose of the reserve."""
    memory_bytes = float(cluster.rank_memory_bytes or 0)
    libraries = process_bytes(cluster, 0)
    error_bytes = memory_bytes - enough_bytes(cluster, memory_bytes, SAFE_OOM_PROBABILITY)
    owner = "the CUDA context" if cluster.uses_cuda and cluster.calibration is None else "driver and libraries"
    reserve = [f"{format_gib(libraries)} for {owner}"] if libraries else []
    reserve.append(f"{format_gib(error_bytes)} for errors of the prediction (P(OOM) {SAFE_OOM_PROBABILITY:.0%})")
    if (factor := bytes_per_counted_byte(cluster)) != 1:
        reserve.append(f"and {factor:.2f} measured bytes per byte of tensors")
    limit = safe_capacity_bytes(cluster)
    total = format_gib(memory_bytes)
    if cluster.uses_cuda:
        total += ", including the memory that PyTorch's allocator and NCCL reserve"
    usable = f"limit: a rank can use {format_gib(limit)} ({format_bytes(limit)})"
    return f"{usable} of {total}; the reserve is {', '.join(reserve)}"


def node_host_bytes(cluster: ClusterSpec, rank_host_bytes: float) -> float:
    """Return the CPU memory that a node needs if each rank needs `rank_host_bytes`.

    The result is 0 if CPUs compute, because offloaded bytes then count as device memory.
    """
    return 0.0 if cluster.uses_cpu else rank_host_bytes * (cluster.nproc_per_node or 1)


def describe_host_use(offloads: bool) -> str:
    """Return what ranks on GPUs keep in CPU memory: copies of their state for checkpoints, and what they offload."""
    return "checkpoint copies and offload" if offloads else "checkpoint copies"


def describe_host_need(cluster: ClusterSpec, rank_host_bytes: float, *, offloads: bool) -> str:
    """Return one sentence that compares the ranks' CPU memory with a node's; "" if they need none."""
    needed = node_host_bytes(cluster, rank_host_bytes)
    if not needed:
        return ""
    available = format_gib(node_host_bytes(cluster, host_memory(cluster)))
    availability = f"cluster.host_memory_bytes provides {available}"
    if cluster.host_memory_bytes is None:
        availability = f"cluster.host_memory_bytes is not set, so {available} is assumed"
    owner = f"a node of {plural(cluster.nproc_per_node, 'rank')}" if cluster.nproc_per_node else "a rank"
    return f"CPU memory: {owner} needs up to {format_gib(needed)} for {describe_host_use(offloads)}; {availability}"


def process_bytes(cluster: ClusterSpec, held_bytes: float) -> float:
    """Return the memory of a rank's process, including memory that does not depend on its tensors."""
    if cluster.calibration is None:
        # The exact count of a rank on CUDA includes NCCL.
        context = CONTEXT_BYTES if cluster.uses_cuda else memory_constants_for(cluster).context_gib * GIB
        return held_bytes + context
    return bytes_per_counted_byte(cluster) * held_bytes + cluster.calibration.baseline_process_bytes


def bytes_per_counted_byte(cluster: ClusterSpec) -> float:
    """Return the bytes of memory per counted byte of tensors."""
    return cluster.calibration.bytes_per_counted_byte if cluster.calibration else 1.0

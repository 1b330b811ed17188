"""Whether memory is enough for what ranks hold, as it is counted: a probability, and how much of one is too much."""

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
"""A layout is offered if the probability that memory is not enough is below this, and shown with it: on published
sweeps of one source the fastest that ran filled the memory nearly (first choices are 3.0 % behind the best instead of
4.7 % with 0.05), on another it is 9 of 16 bests among our first three instead of 10."""
SAFE_OOM_PROBABILITY = 0.05
"""Below this a layout is taken, or said to fit, without a look at that probability."""


def device_and_host_bytes(cluster: ClusterSpec, memories: Collection[RankMemory]) -> tuple[float, float]:
    """The most bytes that a rank has on its device, and in CPU memory (`RankMemory.host`); on a CPU both are there.
    Runs on a machine may have shown that buffers of communication take more than they are counted."""
    host = max(rank_memory.host for rank_memory in memories)
    more = cluster.calibration.buffer_overhead if cluster.calibration else 0.0
    device = max(rank_memory.device + more * rank_memory.communication for rank_memory in memories)
    return float(device + (host if cluster.uses_cpu else 0)), float(host)


def layout_oom_probability(cluster: ClusterSpec, held_bytes: float, host_bytes: float) -> float:
    """The probability that memory is not enough for a rank that holds tensors of so many bytes."""
    used = np.array([process_bytes(cluster, held_bytes), max(host_bytes, 1)])
    there = np.array([float(cluster.rank_memory_bytes or 1), host_memory(cluster)])
    return float(exceedance_probability(memory_constants_for(cluster), used, there).max())


def ranks_oom_probability(cluster: ClusterSpec, memories: Collection[RankMemory]) -> float:
    """Return the probability that memory is not enough for the fullest of some ranks."""
    return layout_oom_probability(cluster, *device_and_host_bytes(cluster, memories))


def describe_fit(p_oom: float) -> str:
    """Say whether a layout fits; between the two thresholds `phalanx plan` offers it and says that it may not."""
    if p_oom >= MAX_OOM_PROBABILITY:
        return "does not fit"
    return "fits" if p_oom < SAFE_OOM_PROBABILITY else f"may not fit (P(OOM) {p_oom:.0%})"


def safe_capacity_bytes(cluster: ClusterSpec) -> float:
    """Bytes of tensors that a rank may hold on its device so that memory is almost surely enough."""
    enough = enough_bytes(cluster, cluster.rank_memory_bytes or 0, SAFE_OOM_PROBABILITY)
    return max(0.0, enough - process_bytes(cluster, 0)) / bytes_per_counted_byte(cluster)


def enough_bytes(cluster: ClusterSpec, memory_bytes: float, max_probability: float) -> float:
    """Return the bytes up to which a memory may be filled by prediction, so that P(OOM) is at most a probability."""
    return memory_bytes * exp(memory_constants_for(cluster).spread * NormalDist().inv_cdf(max_probability))


def describe_memory_limit(cluster: ClusterSpec) -> str:
    """Describe in one sentence how much of a device's memory tensors may take, and what the reserve is for."""
    memory_bytes = float(cluster.rank_memory_bytes or 0)
    libraries = process_bytes(cluster, 0)
    error_bytes = memory_bytes - enough_bytes(cluster, memory_bytes, SAFE_OOM_PROBABILITY)
    owner = "the CUDA context" if cluster.uses_cuda and cluster.calibration is None else "driver and libraries"
    reserve = [f"{format_gib(libraries)} for {owner}"] if libraries else []
    reserve.append(f"{format_gib(error_bytes)} for errors of the prediction (P(OOM) {SAFE_OOM_PROBABILITY:.0%})")
    if (factor := bytes_per_counted_byte(cluster)) != 1:
        reserve.append(f"and a byte of tensors takes {factor:.2f} as measured")
    limit = safe_capacity_bytes(cluster)
    beside_tensors = ", with what PyTorch's allocator reserves and NCCL takes" if cluster.uses_cuda else ""
    return (
        f"limit: a rank may hold {format_gib(limit)} ({format_bytes(limit)}) of {format_gib(memory_bytes)}"
        f"{beside_tensors}; "
        f"the reserve is {', '.join(reserve)}"
    )


def node_host_bytes(cluster: ClusterSpec, rank_host_bytes: float) -> float:
    """Return the bytes of CPU memory that a node needs if each rank needs as given; 0 where CPUs compute, whose
    offloaded bytes count as memory of the device."""
    return 0.0 if cluster.uses_cpu else rank_host_bytes * (cluster.nproc_per_node or 1)


def describe_host_need(cluster: ClusterSpec, rank_host_bytes: float) -> str:
    """Compare in one sentence the CPU memory that ranks need with what a node has; "" where they need none."""
    needed = node_host_bytes(cluster, rank_host_bytes)
    if not needed:
        return ""
    available = format_gib(node_host_bytes(cluster, host_memory(cluster)))
    given = f"by cluster.host_memory_bytes it has {available}"
    if cluster.host_memory_bytes is None:
        given = f"make sure that it is there: cluster.host_memory_bytes is not set, {available} is assumed"
    owner = f"a node of {plural(cluster.nproc_per_node, 'rank')}" if cluster.nproc_per_node else "a rank"
    return f"CPU memory: {owner} needs up to {format_gib(needed)} for checkpoint copies and offload; {given}"


def process_bytes(cluster: ClusterSpec, held_bytes: float) -> float:
    """Bytes of memory of a rank that holds tensors of so many, with what is there whatever it trains."""
    if cluster.calibration is None:
        context = CONTEXT_BYTES if cluster.uses_cuda else memory_constants_for(cluster).context_gib * GIB
        return held_bytes + context  # what NCCL takes is among what a rank on CUDA is counted to hold
    return bytes_per_counted_byte(cluster) * held_bytes + cluster.calibration.baseline_process_bytes


def bytes_per_counted_byte(cluster: ClusterSpec) -> float:
    """Bytes of memory for each that is counted of tensors."""
    return cluster.calibration.bytes_per_counted_byte if cluster.calibration else 1.0

"""Time of ZeRO-3's all-gathers and reduce-scatters, which overlap with the passes of a block."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from phalanx.cost.estimate.block_time import StageTime, smooth_max
from phalanx.cost.estimate.collective_time import network_bandwidth, ring_seconds
from phalanx.cost.estimate.constants import TimeConstants
from phalanx.cost.estimate.job_table import JobTable
from phalanx.cost.estimate.offload import upload_seconds
from phalanx.cost.kinds import Column


@dataclass(frozen=True)
class _ShardingTime:
    """Seconds of ZeRO-3's communication for one block."""

    gather: Column
    upload: Column
    """Copies of offloaded parameters to the device before the gather."""
    scatter: Column

    def __add__(self, other: _ShardingTime) -> _ShardingTime:
        return _ShardingTime(self.gather + other.gather, self.upload + other.upload, self.scatter + other.scatter)


def _sharding_seconds(
    constants: TimeConstants, jobs: JobTable, parameters: Column, ranks: Column, copies: Column, stride: Column
) -> _ShardingTime:
    """Return the seconds to gather sharded parameters and to reduce-scatter their gradients.

    `ranks` that are `stride` apart share the parameters, and gradients are summed over `copies` of them. DeepSpeed
    gathers single parameters, each in one ring that leaves a node through one network card.
    """
    calls = np.sign(parameters)

    def ring_exchange_seconds(size_bytes: Column) -> Column:
        grouped_seconds = ring_seconds(constants, jobs, size_bytes, ranks=ranks, stride=stride, calls=calls)
        return np.where(_gathers_singly(jobs), size_bytes / network_bandwidth(constants, jobs), grouped_seconds)

    gradient_bytes = jobs.gradient_wire_bytes * parameters
    replica_reduce = ring_seconds(
        constants, jobs, gradient_bytes / ranks, ranks=copies, stride=stride * ranks, reduces=True, calls=calls
    )
    return _ShardingTime(
        ring_exchange_seconds(jobs.compute_dtype_bytes * parameters),
        upload_seconds(jobs, parameters / ranks),
        ring_exchange_seconds(gradient_bytes) + replica_reduce,
    )


def _gathers_singly(jobs: JobTable) -> NDArray[np.bool_]:
    return (jobs.deepspeed > 0) & (jobs.ranks > jobs.fast_link_domain)


def add_zero3_communication(constants: TimeConstants, jobs: JobTable, block: StageTime, experts: Column) -> StageTime:
    """Return `block` with ZeRO-3's gathers and reduce-scatters, which overlap with the passes.

    Each pass gathers the next block's parameters, and the backward pass also reduce-scatters gradients.

    Args:
        constants: Fitted constants of time.
        jobs: Columns of jobs.
        block: Times of a block without this communication.
        experts: Parameters of a rank's experts in the block, which ranks with the same experts share.
    """
    sharding = _dense_sharding_time(constants, jobs) + _expert_sharding_time(constants, jobs, experts)
    forward_exchange = sharding.gather + sharding.upload
    backward_exchange = forward_exchange + sharding.scatter
    forward = _exposed_seconds(jobs, block.forward, forward_exchange)
    backward = _exposed_seconds(jobs, block.backward, backward_exchange)
    exposed_fractions = forward / np.maximum(forward_exchange, 1e-30) + backward / np.maximum(backward_exchange, 1e-30)
    upload = sharding.upload * exposed_fractions
    sharded = replace(
        block,
        forward=block.forward + forward,
        backward=block.backward + backward,
        sharding=forward + backward - upload,
        upload=block.upload + upload,
    )
    return block.replaced_where(jobs.zero_stage >= 3, sharded)


def _dense_sharding_time(constants: TimeConstants, jobs: JobTable) -> _ShardingTime:
    """Return the communication of a block's parameters without experts."""
    return _sharding_seconds(
        constants,
        jobs,
        (jobs.parameters - jobs.expert_parameters) / jobs.layers / jobs.tp,
        ranks=jobs.shard_group_size,
        copies=jobs.dp * jobs.cp / jobs.shard_group_size,
        stride=jobs.tp,
    )


def _expert_sharding_time(constants: TimeConstants, jobs: JobTable, experts: Column) -> _ShardingTime:
    """Return the communication of a rank's experts in a block."""
    ranks = np.clip(jobs.shard_group_size * jobs.tp / jobs.expert_shards, 1, jobs.expert_replicas)
    return _sharding_seconds(
        constants, jobs, experts, ranks=ranks, copies=jobs.expert_replicas / ranks, stride=jobs.expert_shards
    )


def _exposed_seconds(jobs: JobTable, pass_seconds: Column, exchange_seconds: Column) -> Column:
    """Return the seconds that communication adds to a pass.

    DeepSpeed prefetches few parameters at a time, which hides worse than a full block. Nothing hides on compute cores.
    """
    overlapped_seconds = np.where(
        _gathers_singly(jobs),
        smooth_max(pass_seconds, exchange_seconds, 2),
        smooth_max(pass_seconds, exchange_seconds, 6),
    )
    return np.where(jobs.comm_uses_compute_cores > 0, exchange_seconds, overlapped_seconds - pass_seconds)

"""Time after the backward pass: exposed gradient communication and the optimizer update."""

from __future__ import annotations

import numpy as np

from phalanx.cost.estimate.block_time import StageTime
from phalanx.cost.estimate.collective_time import ring_seconds
from phalanx.cost.estimate.constants import TimeConstants
from phalanx.cost.estimate.job_table import JobTable
from phalanx.cost.estimate.kernel_time import memory_pass_seconds
from phalanx.cost.kinds import Column


def data_parallel_seconds(constants: TimeConstants, jobs: JobTable, stage: StageTime) -> Column:
    """Return the seconds of gradient and parameter communication that the passes do not hide.

    Parameters are gathered after the update. If the gather overlaps, it does so with the next step's forward pass.

    Args:
        constants: Fitted constants of time.
        jobs: Columns of jobs.
        stage: Times of a stage, in whose passes the communication can hide.
    """
    dense, experts = parameters_per_rank(jobs)
    ranks = jobs.dp * jobs.cp
    bucket = np.where(jobs.overlap_grad_reduce > 0, constants.bucket_bytes / 2, np.inf)
    num_calls = np.maximum(1, dense / bucket)
    num_expert_calls = np.maximum(1, experts / bucket)
    is_zero12 = (jobs.zero_stage >= 1) & (jobs.zero_stage < 3)
    shards_over_all_ranks = jobs.shard_group_size >= ranks
    scatter_seconds = ring_seconds(
        constants, jobs, jobs.gradient_wire_bytes * dense, ranks=ranks, stride=jobs.tp, calls=num_calls
    )
    reduce_seconds = ring_seconds(
        constants, jobs, jobs.gradient_wire_bytes * dense, ranks=ranks, stride=jobs.tp, reduces=True, calls=num_calls
    )
    gather_seconds = ring_seconds(
        constants, jobs, jobs.compute_dtype_bytes * dense, ranks=jobs.shard_group_size, stride=jobs.tp, calls=num_calls
    )
    expert_replicas = jobs.expert_replicas
    expert_bytes = (jobs.gradient_wire_bytes + jobs.compute_dtype_bytes) * experts
    expert_seconds = ring_seconds(
        constants, jobs, expert_bytes, ranks=expert_replicas, stride=jobs.expert_shards, calls=num_expert_calls
    )
    total_seconds = np.where(is_zero12 & shards_over_all_ranks, scatter_seconds, reduce_seconds) + np.where(
        is_zero12, gather_seconds, 0.0
    )
    total_seconds = total_seconds + np.where(jobs.experts > 0, expert_seconds, 0.0)
    total_seconds = np.where(jobs.zero_stage >= 3, 0.0, total_seconds)
    exposed_gather = np.where(is_zero12 & (jobs.overlap_param_gather == 0), gather_seconds, 0.0)
    window_seconds = np.where(
        (jobs.overlap_grad_reduce > 0) & (jobs.comm_uses_compute_cores == 0),
        constants.overlap * (stage.backward + stage.forward / 2),
        0.0,
    )
    earlier_seconds = (jobs.grad_reductions_per_step - 1) * _exposed_seconds(constants, scatter_seconds, window_seconds)
    return (
        _exposed_seconds(constants, total_seconds - exposed_gather, window_seconds) + exposed_gather + earlier_seconds
    )


def _exposed_seconds(constants: TimeConstants, exchange_seconds: Column, window_seconds: Column) -> Column:
    """Return the exposed seconds of communication that overlaps with the backward pass."""
    hidden_seconds: Column = np.minimum(exchange_seconds, window_seconds)
    return exchange_seconds - hidden_seconds + constants.overlap_leak * hidden_seconds


def parameters_per_rank(jobs: JobTable) -> tuple[Column, Column]:
    """Return a middle stage's parameters that all data-parallel ranks share, and those of its experts."""
    dense = (jobs.parameters - jobs.expert_parameters) / (jobs.tp * jobs.pp)
    return dense, jobs.expert_parameters / (jobs.expert_shards * jobs.pp)


def owned_parameters(jobs: JobTable) -> Column:
    """Return the number of parameters that a rank of a middle stage updates."""
    dense, experts = parameters_per_rank(jobs)
    return np.where(
        jobs.zero_stage >= 1, dense / jobs.shard_group_size + experts / jobs.expert_replicas, dense + experts
    )


def update_seconds(constants: TimeConstants, jobs: JobTable) -> Column:
    """Return the seconds of the optimizer on the device, the gradient norm and zeroing of gradients."""
    dense, _ = parameters_per_rank(jobs)
    owned = np.where(jobs.offload > 0, 0.0, owned_parameters(jobs))
    return memory_pass_seconds(constants, jobs, 2 * constants.optimizer_passes * owned + 4 * dense)

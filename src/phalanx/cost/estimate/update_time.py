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

        T_dp = exposed(R + G + E - G_late) + G_late + (n - 1) exposed(S)

    R reduces the dense gradients, and G gathers the updated dense parameters (ZeRO-1 and 2). E does both for experts.
    G_late is the part of G that cannot overlap with the next step's forward pass. Of n gradient reductions per step,
    all but the last are reduce-scatters S. ZeRO-3 communicates within the passes (`zero3_time`), so R, G and E are 0.

    Args:
        constants: Fitted constants of time.
        jobs: Columns of jobs.
        stage: Times of a stage, in whose passes the communication can hide.
    """
    is_zero12 = (jobs.zero_stage >= 1) & (jobs.zero_stage < 3)
    is_zero3 = jobs.zero_stage >= 3
    shards_over_all_ranks = jobs.shard_group_size >= jobs.dp * jobs.cp
    grad_scatter_seconds = _grad_sync_seconds(constants, jobs, all_reduce=False)
    grad_reduce_seconds = np.where(
        is_zero12 & shards_over_all_ranks, grad_scatter_seconds, _grad_sync_seconds(constants, jobs, all_reduce=True)
    )
    param_gather_seconds = np.where(is_zero12, _param_gather_seconds(constants, jobs), 0.0)
    expert_seconds = np.where(jobs.experts > 0, _expert_sync_seconds(constants, jobs), 0.0)
    total_seconds = np.where(is_zero3, 0.0, grad_reduce_seconds + param_gather_seconds + expert_seconds)
    late_gather_seconds = np.where(jobs.overlap_param_gather == 0, param_gather_seconds, 0.0)
    window_seconds = _overlap_window_seconds(constants, jobs, stage)
    earlier_seconds = (jobs.grad_reductions_per_step - 1) * _exposed_seconds(
        constants, grad_scatter_seconds, window_seconds
    )
    return (
        _exposed_seconds(constants, total_seconds - late_gather_seconds, window_seconds)
        + late_gather_seconds
        + earlier_seconds
    )


def _grad_sync_seconds(constants: TimeConstants, jobs: JobTable, all_reduce: bool) -> Column:
    """Return the seconds to all-reduce or reduce-scatter the dense gradients among all data-parallel ranks."""
    dense, _ = parameters_per_rank(jobs)
    return ring_seconds(
        constants,
        jobs,
        jobs.gradient_wire_bytes * dense,
        ranks=jobs.dp * jobs.cp,
        stride=jobs.tp,
        reduces=all_reduce,
        calls=_bucket_count(constants, jobs, dense),
    )


def _param_gather_seconds(constants: TimeConstants, jobs: JobTable) -> Column:
    """Return the seconds to all-gather the updated dense parameters within a ZeRO shard group."""
    dense, _ = parameters_per_rank(jobs)
    return ring_seconds(
        constants,
        jobs,
        jobs.compute_dtype_bytes * dense,
        ranks=jobs.shard_group_size,
        stride=jobs.tp,
        calls=_bucket_count(constants, jobs, dense),
    )


def _expert_sync_seconds(constants: TimeConstants, jobs: JobTable) -> Column:
    """Return the seconds to reduce gradients and gather parameters of experts, among ranks with the same experts."""
    _, experts = parameters_per_rank(jobs)
    return ring_seconds(
        constants,
        jobs,
        (jobs.gradient_wire_bytes + jobs.compute_dtype_bytes) * experts,
        ranks=jobs.expert_replicas,
        stride=jobs.expert_shards,
        calls=_bucket_count(constants, jobs, experts),
    )


def _bucket_count(constants: TimeConstants, jobs: JobTable, parameters: Column) -> Column:
    """Return the number of collectives: one per bucket if they overlap with the backward pass, else one."""
    bucket_elements = np.where(jobs.overlap_grad_reduce > 0, constants.bucket_bytes / 2, np.inf)
    return np.maximum(1, parameters / bucket_elements)


def _overlap_window_seconds(constants: TimeConstants, jobs: JobTable, stage: StageTime) -> Column:
    """Return the seconds of a micro-batch's passes in which data-parallel communication can hide."""
    can_overlap = (jobs.overlap_grad_reduce > 0) & (jobs.comm_uses_compute_cores == 0)
    return np.where(can_overlap, constants.overlap * (stage.backward + stage.forward / 2), 0.0)


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

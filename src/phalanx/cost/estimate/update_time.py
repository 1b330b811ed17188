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
    """Return the seconds of gradient and parameter communication that the passes of `stage` do not hide.

        T_dp = exposed(R + G + E - G_late) + G_late + (n - 1) exposed(S)

    R reduces the dense gradients, and G gathers the updated dense parameters (ZeRO-1 and 2). E does both for experts.
    G_late is the part of G that cannot overlap with the next step's forward pass. Of n gradient reductions per step,
    all but the last are reduce-scatters S. ZeRO-3 communicates within the passes (`zero3_time`), so R, G and E are 0.
    """
    is_zero12 = (jobs.zero_stage >= 1) & (jobs.zero_stage < 3)
    shards_over_all_ranks = jobs.shard_group_size >= jobs.dp * jobs.cp
    dense, experts = parameters_per_rank(jobs)
    # One collective per bucket if they overlap with the backward pass, else one.
    bucket_elements = np.where(jobs.overlap_grad_reduce > 0, constants.bucket_bytes / 2, np.inf)
    dense_buckets = np.maximum(1, dense / bucket_elements)
    expert_buckets = np.maximum(1, experts / bucket_elements)

    def dense_seconds(bytes_per_parameter: Column, ranks: Column, all_reduce: bool = False) -> Column:
        size_bytes = bytes_per_parameter * dense
        return ring_seconds(constants, jobs, size_bytes, ranks, jobs.tp, all_reduce, calls=dense_buckets)

    scatter = dense_seconds(jobs.gradient_wire_bytes, jobs.dp * jobs.cp)
    all_reduce = dense_seconds(jobs.gradient_wire_bytes, jobs.dp * jobs.cp, all_reduce=True)
    reduce = np.where(is_zero12 & shards_over_all_ranks, scatter, all_reduce)
    gather = np.where(is_zero12, dense_seconds(jobs.compute_dtype_bytes, jobs.shard_group_size), 0.0)
    expert_bytes = (jobs.gradient_wire_bytes + jobs.compute_dtype_bytes) * experts
    expert_seconds = np.where(
        jobs.experts > 0,
        ring_seconds(
            constants, jobs, expert_bytes, jobs.expert_replicas, stride=jobs.expert_shards, calls=expert_buckets
        ),
        0.0,
    )
    total = np.where(jobs.zero_stage >= 3, 0.0, reduce + gather + expert_seconds)
    late_gather = np.where(jobs.overlaps_param_gather, 0.0, gather)
    can_overlap = (jobs.overlap_grad_reduce > 0) & jobs.can_overlap
    window = np.where(can_overlap, constants.overlap * (stage.backward + stage.forward / 2), 0.0)

    def exposed_seconds(exchange_seconds: Column) -> Column:
        hidden_seconds = np.minimum(exchange_seconds, window)
        return exchange_seconds - hidden_seconds + constants.overlap_leak * hidden_seconds

    earlier_reductions = (jobs.grad_reductions_per_step - 1) * exposed_seconds(scatter)
    return exposed_seconds(total - late_gather) + late_gather + earlier_reductions


def parameters_per_rank(jobs: JobTable) -> tuple[Column, Column]:
    """Return a middle stage's trained parameters that all data-parallel ranks share, and those of its experts."""
    dense = (jobs.parameters - jobs.expert_parameters) / (jobs.tp * jobs.pp)
    experts = jobs.expert_parameters / (jobs.expert_shards * jobs.pp)
    return jobs.trained_share * dense, jobs.trained_share * experts


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

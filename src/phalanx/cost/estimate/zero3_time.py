"""Time of ZeRO-3's all-gathers and reduce-scatters, which overlap with the passes of a block."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from phalanx.cost.estimate.block_time import StageTime, smooth_max
from phalanx.cost.estimate.collective_time import network_bandwidth, ring_seconds
from phalanx.cost.estimate.constants import TimeConstants
from phalanx.cost.estimate.job_table import JobTable
from phalanx.cost.estimate.offload import upload_seconds
from phalanx.cost.kinds import Column


def add_zero3_communication(constants: TimeConstants, jobs: JobTable, block: StageTime, experts: Column) -> StageTime:
    """Return `block` with ZeRO-3's gathers and reduce-scatters, which overlap with the passes.

    Each pass gathers the next block's parameters, and the backward pass also reduce-scatters gradients. `experts` are
    the parameters of a rank's experts in the block, which ranks with the same experts share. DeepSpeed gathers single
    parameters, each in one ring that leaves a node through one network card. It prefetches few parameters at a time,
    which hides worse than a full block.
    """
    gathers_singly = jobs.is_deepspeed & (jobs.ranks > jobs.fast_link_domain)

    def sharding_seconds(
        parameters: Column, ranks: Column, copies: Column, stride: Column
    ) -> tuple[Column, Column, Column]:
        """Return the seconds to gather parameters, to copy offloaded ones to the device, and to reduce gradients.

        `ranks` that are `stride` apart share the parameters, and gradients are summed over `copies` of them.
        """
        calls = np.sign(parameters)

        def exchange_seconds(size_bytes: Column) -> Column:
            grouped_seconds = ring_seconds(constants, jobs, size_bytes, ranks, stride, calls=calls)
            return np.where(gathers_singly, size_bytes / network_bandwidth(constants, jobs), grouped_seconds)

        gradient_bytes = jobs.gradient_wire_bytes * jobs.trained_share * parameters
        replica_reduce = ring_seconds(
            constants, jobs, gradient_bytes / ranks, copies, stride * ranks, all_reduce=True, calls=calls
        )
        return (
            exchange_seconds(jobs.compute_dtype_bytes * parameters),
            upload_seconds(jobs, parameters / ranks),
            exchange_seconds(gradient_bytes) + replica_reduce,
        )

    def exposed_seconds(pass_seconds: Column, exchange_seconds: Column) -> Column:
        overlapped_seconds = np.where(
            gathers_singly,
            smooth_max(pass_seconds, exchange_seconds, 2),
            smooth_max(pass_seconds, exchange_seconds, 6),
        )
        return np.where(jobs.can_overlap, overlapped_seconds - pass_seconds, exchange_seconds)

    dense = (jobs.parameters - jobs.expert_parameters) / jobs.layers / jobs.tp
    dense_copies = jobs.dp * jobs.cp / jobs.shard_group_size
    expert_ranks = np.clip(jobs.shard_group_size * jobs.tp / jobs.expert_shards, 1, jobs.expert_replicas)
    expert_copies = jobs.expert_replicas / expert_ranks
    gather, upload, scatter = (
        dense_part + expert_part
        for dense_part, expert_part in zip(
            sharding_seconds(dense, jobs.shard_group_size, dense_copies, stride=jobs.tp),
            sharding_seconds(experts, expert_ranks, expert_copies, stride=jobs.expert_shards),
            strict=True,
        )
    )
    forward_exchange = gather + upload
    backward_exchange = forward_exchange + scatter
    forward = exposed_seconds(block.forward, forward_exchange)
    backward = exposed_seconds(block.backward, backward_exchange)
    exposed_fractions = forward / np.maximum(forward_exchange, 1e-30) + backward / np.maximum(backward_exchange, 1e-30)
    exposed_upload = upload * exposed_fractions
    sharded = replace(
        block,
        forward=block.forward + forward,
        backward=block.backward + backward,
        sharding=forward + backward - exposed_upload,
        upload=block.upload + exposed_upload,
    )
    return block.replaced_where(jobs.zero_stage >= 3, sharded)

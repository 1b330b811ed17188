"""Memory of a layout on the fullest rank: state, activations in flight, logits and buffers.

The estimate covers any trainer and many layouts at once. `cost.exact.rank_memory` counts Phalanx's own memory to the
byte.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import erf, sqrt

import numpy as np
from numpy.typing import NDArray

from phalanx.cost.estimate.block_activations import BlockActivations, activation_bytes
from phalanx.cost.estimate.constants import MemoryConstants
from phalanx.cost.estimate.job_table import JobTable
from phalanx.cost.estimate.offload import device_state_bytes, host_bytes
from phalanx.cost.kinds import ActivationCheckpointing, Column, ScheduleKind
from phalanx.cost.precision import STATE_BYTES, master_weight_bytes
from phalanx.spec.formatting import GIB

DEEPSPEED_BUCKET_ELEMENTS = 5e8
"""Elements of DeepSpeed's reduce and gather buffers (reduce_bucket_size, allgather_bucket_size)."""


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Peak allocated bytes on a rank of one stage."""

    state: Column
    activations: Column
    """Bytes of all micro-batches in flight, including recomputed activations."""
    fragmented: Column
    """Part of `activations`: one micro-batch's, allocated and freed between those of other micro-batches."""
    logits: Column
    buffers: Column
    host: Column
    """Bytes of CPU memory for offloaded state and activations; not part of `total`."""

    @property
    def total(self) -> Column:
        """Bytes of device memory."""
        return self.state + self.activations + self.logits + self.buffers


@dataclass(frozen=True)
class StageMemoryTable:
    """Bytes by stage: the first, the second and the last.

    The second stage has more blocks than the first if the first has the embedding.
    """

    first: StageMemory
    middle: StageMemory
    last: StageMemory

    @property
    def allocated(self) -> Column:
        """Bytes of the fullest stage."""
        return np.maximum(np.maximum(self.first.total, self.middle.total), self.last.total)

    @property
    def host(self) -> Column:
        """Bytes of CPU memory for a rank of the stage that offloads most."""
        return np.maximum(np.maximum(self.first.host, self.middle.host), self.last.host)


@dataclass(frozen=True, kw_only=True)
class _Stage:
    """Contents of a rank of one pipeline stage, as far as its memory depends on them."""

    blocks: Column
    moe_blocks: Column
    recomputed: Column
    """Fraction of `blocks` that recompute activations."""
    num_tables: Column | float
    """Tables of vocab x width parameters: embedding and output projection."""
    has_head: NDArray[np.bool_]
    in_flight: Column
    """Micro-batches whose activations exist at once."""


def estimate_memory(constants: MemoryConstants, jobs: JobTable) -> StageMemoryTable:
    """Return the bytes of the first, the second and the last stage."""
    first, middle, last = _pipeline_stages(jobs)
    estimate_stage = partial(
        _stage_memory,
        constants,
        jobs,
        block=activation_bytes(constants, jobs),
        logits=_logit_bytes(constants, jobs),
        buffers=_buffer_bytes(constants, jobs),
    )
    return StageMemoryTable(estimate_stage(first), estimate_stage(middle), estimate_stage(last))


def _pipeline_stages(jobs: JobTable) -> tuple[_Stage, _Stage, _Stage]:
    """Return the first, the second and the last stage. Without a pipeline, the first and the last have all blocks."""
    first_in_flight, middle_in_flight, last_in_flight = peak_in_flight_by_stage(jobs)
    shares_rank = jobs.embedding_and_head_share_rank
    num_tables = np.where(shares_rank, 2 - jobs.tied, 1.0)
    first = _Stage(
        blocks=jobs.first_blocks,
        moe_blocks=jobs.first_moe_blocks,
        recomputed=jobs.first_recomputed,
        num_tables=num_tables,
        has_head=shares_rank,
        in_flight=first_in_flight,
    )
    middle = _Stage(
        blocks=np.where(jobs.has_middle_stages, jobs.middle_blocks, 0.0),
        moe_blocks=jobs.middle_moe_blocks,
        recomputed=jobs.middle_recomputed,
        num_tables=0.0,
        has_head=np.zeros(1, bool),
        in_flight=middle_in_flight,
    )
    last = _Stage(
        blocks=jobs.last_blocks,
        moe_blocks=jobs.last_moe_blocks,
        recomputed=jobs.last_recomputed,
        num_tables=num_tables,
        has_head=np.ones(1, bool),
        in_flight=last_in_flight,
    )
    return first, middle, last


def _stage_memory(
    constants: MemoryConstants,
    jobs: JobTable,
    stage: _Stage,
    block: BlockActivations,
    logits: Column,
    buffers: Column,
) -> StageMemory:
    """Return the bytes of a rank of one stage.

    One block at a time is recomputed. By then, the blocks that recompute nothing have freed their activations.
    """
    state, host = _state_bytes(constants, jobs, stage)
    freed_bytes = stage.blocks * (1 - stage.recomputed) * block.unwrapped
    saved_bytes = stage.blocks * stage.recomputed * block.saved + freed_bytes
    recomputed_bytes = np.where(stage.recomputed > 0, np.maximum(block.recomputed - freed_bytes, 0.0), 0.0)
    scatters = (stage.in_flight > 1) & (stage.in_flight < jobs.micro_batches)
    return StageMemory(
        state=state,
        activations=stage.in_flight * (saved_bytes + _sent_bytes(jobs)) + recomputed_bytes,
        fragmented=np.where(scatters, saved_bytes, 0.0),
        logits=np.where(stage.has_head, logits, 0.0),
        buffers=buffers,
        host=host + stage.in_flight * stage.blocks * stage.recomputed * block.offloaded,
    )


def _uses_pipeline_engine(jobs: JobTable) -> NDArray[np.bool_]:
    return (jobs.deepspeed > 0) & (jobs.zero_stage < 3)


def _sent_bytes(jobs: JobTable) -> Column:
    """Return the bytes of the tensor that a stage sends and that DeepSpeed's pipeline engine saves.

    It saves one for every micro-batch in flight (deepspeed/runtime/pipe/engine.py: pipe_buffers).
    """
    saves_sent_tensor = _uses_pipeline_engine(jobs) & (jobs.pp > 1)
    return np.where(saves_sent_tensor, jobs.compute_dtype_bytes * jobs.tokens * jobs.width, 0.0)


def _buffer_bytes(constants: MemoryConstants, jobs: JobTable) -> Column:
    """Return the bytes of temporary tensors, libraries, and DeepSpeed's buckets."""
    working_bytes = 4 * jobs.compute_dtype_bytes * constants.working * jobs.tokens * jobs.width
    has_buckets = _uses_pipeline_engine(jobs) & (jobs.zero_stage > 0)
    bucket_bytes = np.where(has_buckets, 2 * jobs.gradient_wire_bytes * DEEPSPEED_BUCKET_ELEMENTS, 0.0)
    cast_bytes = np.where(jobs.casts_to_fp8 > 0, (jobs.tokens + jobs.ffn / jobs.tp) * jobs.width, 0.0)
    return working_bytes + constants.workspace_gib * GIB + bucket_bytes + cast_bytes


def reserved_bytes(constants: MemoryConstants, stage_memory: StageMemoryTable) -> Column:
    """Return the device memory of the fullest stage, including the allocator's reserve and context memory.

    Model state is not temporary, so the allocator reserves nothing extra for it. In a pipeline, one micro-batch's
    backward pass frees memory between activations of others. The next forward pass cannot fully use these pieces.
    """
    first, second, last = (
        stage.state + constants.fragmentation * (stage.total - stage.state) + constants.scattered * stage.fragmented
        for stage in (stage_memory.first, stage_memory.middle, stage_memory.last)
    )
    return np.maximum(np.maximum(first, second), last) + constants.context_gib * GIB


def oom_probability(constants: MemoryConstants, jobs: JobTable, stage_memory: StageMemoryTable) -> Column:
    """Return the probability that the device's memory, or with offload the CPU's, is insufficient."""
    return exceedance_probability(constants, memory_utilization(constants, jobs, stage_memory), np.ones(1))


def memory_utilization(constants: MemoryConstants, jobs: JobTable, stage_memory: StageMemoryTable) -> Column:
    """Return used / available memory of the device, or with offload of the CPU if that is fuller."""
    device_utilization: Column = reserved_bytes(constants, stage_memory) / jobs.memory_bytes
    if not (jobs.offload.any() or (jobs.recompute == ActivationCheckpointing.OFFLOAD).any()):
        return device_utilization
    return np.maximum(device_utilization, np.maximum(stage_memory.host, 1.0) / jobs.host_memory_bytes)


def exceedance_probability(constants: MemoryConstants, used_bytes: Column, memory_bytes: Column) -> Column:
    """Return the probability that a run uses more than `memory_bytes`, with a log-normal error of `used_bytes`."""
    excess = np.log(used_bytes / memory_bytes) / constants.spread
    erf_value: Column = np.vectorize(erf, otypes=[np.float64])(excess / sqrt(2))
    return 0.5 * (1 + erf_value)


def peak_in_flight_by_stage(jobs: JobTable) -> tuple[Column, Column, Column]:
    """Return the maximum number of micro-batches whose activations the first, the second and the last stage hold.

    1F1B: stage s of p holds p - s. Interleaved: the first holds p + (p-1)/v (arXiv 2205.05198, section 4.2.3), each
    further one 2/v less. ZB-H1: p on all stages, as 1F1B's first. ZB-H2: 2p - 1. ZB-V: p (arXiv 2401.10241 and
    2405.15362).
    """
    p = jobs.pp
    m = jobs.micro_batches
    v = np.maximum(jobs.virtual_stages, 1)
    conditions = [
        jobs.schedule == ScheduleKind.NONE,
        jobs.schedule == ScheduleKind.INTERLEAVED,
        jobs.schedule == ScheduleKind.ZB_H1,
        jobs.schedule == ScheduleKind.ZB_H2,
        jobs.schedule == ScheduleKind.ZB_V,
        jobs.schedule == ScheduleKind.GPIPE,
    ]
    ones = np.ones_like(p)
    first = np.select(conditions, [ones, p + (p - 1) / v, p, 2 * p - 1, p, m], p)
    middle = np.select(conditions, [ones, p + (p - 3) / v, p, 2 * p - 1, p, m], np.maximum(p - 1, 1))
    last = np.select(conditions, [ones, (p * (v - 1) + 1) / v, p, 2 * p - 1, p, m], ones)
    return np.minimum(first, m), np.minimum(middle, m), np.minimum(last, m)


def _state_bytes(constants: MemoryConstants, jobs: JobTable, stage: _Stage) -> tuple[Column, Column]:
    """Return the bytes of parameters, gradients and optimizer state on the device and in CPU memory.

    ZeRO shards them (arXiv 1910.02054, section 5). ZeRO-3 gathers the parameters of a few blocks.
    """
    table_parameters = jobs.vocab * jobs.width
    dense_per_block = (
        (jobs.parameters - jobs.expert_parameters - table_parameters * (2 - jobs.tied)) / jobs.layers / jobs.tp
    )
    num_moe_blocks = np.maximum(jobs.layers - jobs.dense_layers, 1)
    experts_per_block = jobs.expert_parameters / num_moe_blocks / jobs.expert_shards
    dense_parameters = stage.blocks * dense_per_block + stage.num_tables * table_parameters / jobs.tp
    expert_parameters = stage.moe_blocks * experts_per_block
    gathered_bytes = np.where(
        jobs.zero_stage >= 3, 2 * jobs.compute_dtype_bytes * constants.gathered_blocks * dense_per_block, 0.0
    )
    device_bytes = (
        _sharded_state_bytes(jobs, dense_parameters, jobs.shard_group_size)
        + _sharded_state_bytes(jobs, expert_parameters, jobs.expert_replicas)
        + gathered_bytes
    )
    owned_parameters = dense_parameters / jobs.shard_group_size + expert_parameters / jobs.expert_replicas
    return device_bytes, owned_parameters * host_bytes(jobs)


def _sharded_state_bytes(jobs: JobTable, parameters: Column, ranks: Column) -> Column:
    shares = [np.where(jobs.zero_stage >= stage, 1 / ranks, 1.0) for stage in (3, 2, 1)]
    return parameters * sum(
        share * bytes_per_parameter for share, bytes_per_parameter in zip(shares, device_state_bytes(jobs), strict=True)
    )


def _logit_bytes(constants: MemoryConstants, jobs: JobTable) -> Column:
    """Return the bytes of the logits.

    Most of them are the loss's own, which is in fp32 if products are in 16 bits. Phalanx has the logits alone, or those
    of a chunk and the gradient of the head's matrix.
    """
    is_fused = (jobs.hardware_generation > 0) & ((jobs.fused_elementwise > 0) | (jobs.compiled > 0))
    pytorch_bytes = (
        np.where(is_fused, constants.logit_fused_bytes, constants.logit_bytes)
        * master_weight_bytes(jobs.compute_dtype_bytes)
        / STATE_BYTES["bf16"]
    )
    bytes_per_logit = np.where(jobs.lean_activations > 0, jobs.compute_dtype_bytes, pytorch_bytes)
    gather_factor = np.where((jobs.gathers_logits > 0) & (jobs.tp > 1), constants.logit_gathered, 1.0)
    vocab = jobs.vocab / np.where(jobs.gathers_logits > 0, 1.0, jobs.tp)
    matrix_bytes = np.where(jobs.loss_chunks > 1, jobs.gradient_bytes * vocab * jobs.width, 0.0)
    return jobs.tokens / jobs.loss_chunks * vocab * bytes_per_logit * gather_factor + matrix_bytes

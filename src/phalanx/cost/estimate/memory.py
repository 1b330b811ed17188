"""Memory of a layout on the fullest rank: state, activations in flight, logits and buffers.

The estimate covers any trainer and many layouts at once. `cost.exact.rank_memory` counts Phalanx's own memory to the
byte.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import erf, sqrt

import numpy as np

from phalanx.cost.estimate.constants import MemoryConstants
from phalanx.cost.estimate.job_table import JobTable
from phalanx.cost.estimate.offload import device_state_bytes, host_bytes
from phalanx.cost.kinds import RECOMPUTING_METHODS, AttentionKernel, Column, ScheduleKind
from phalanx.cost.precision import STATE_BYTES, master_weight_bytes
from phalanx.spec.formatting import GIB

GATED_BYTES = 8.0
"""Bytes per element of a gated MLP's inner width.

Gate, up, the activated gate and their product, in 2 bytes each.
"""
DEEPSPEED_BUCKET_ELEMENTS = 5e8
"""Elements of DeepSpeed's reduce and gather buffers (reduce_bucket_size, allgather_bucket_size)."""


@dataclass(frozen=True)
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
    """Bytes of CPU memory for offloaded state; not part of `total`."""

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


def estimate_memory(constants: MemoryConstants, jobs: JobTable) -> StageMemoryTable:
    """Return the bytes of the first, the second and the last stage.

    DeepSpeed's pipeline engine saves the tensors that a stage sends, in addition to the activations of its blocks, for
    all micro-batches in flight (deepspeed/runtime/pipe/engine.py: pipe_buffers).
    """
    has_no_pipeline = jobs.pp == 1
    shares_rank = jobs.embedding_and_head_share_rank
    saved_bytes, recomputed_bytes = _activation_bytes(constants, jobs)
    tokens = jobs.tokens
    logits = _logit_bytes(constants, jobs, tokens)
    buffers = 4 * jobs.compute_dtype_bytes * constants.working * tokens * jobs.width + constants.workspace_gib * GIB
    first_in_flight, middle_in_flight, last_in_flight = micro_batches_in_flight(jobs)
    num_tables = np.where(shares_rank, 2 - jobs.tied, 1.0)
    uses_pipeline_engine = (jobs.deepspeed > 0) & (jobs.zero_stage < 3)
    buffers = buffers + np.where(
        uses_pipeline_engine & (jobs.zero_stage > 0), 2 * jobs.gradient_wire_bytes * DEEPSPEED_BUCKET_ELEMENTS, 0.0
    )
    sent_bytes = np.where(uses_pipeline_engine & ~has_no_pipeline, jobs.compute_dtype_bytes * tokens * jobs.width, 0.0)

    def estimate_stage(
        blocks: Column, moe_blocks: Column, num_tables: Column | float, in_flight: Column, logits: Column | float
    ) -> StageMemory:
        state, host = _state_bytes(constants, jobs, blocks, moe_blocks=moe_blocks, num_tables=num_tables)
        fragmented = np.where((in_flight > 1) & (in_flight < jobs.micro_batches), blocks * saved_bytes, 0.0)
        activations = in_flight * (blocks * saved_bytes + sent_bytes) + recomputed_bytes
        return StageMemory(state, activations, fragmented, logits=np.zeros(1) + logits, buffers=buffers, host=host)

    first = estimate_stage(
        jobs.first_blocks,
        jobs.first_moe_blocks,
        num_tables,
        in_flight=first_in_flight,
        logits=np.where(shares_rank, logits, 0.0),
    )
    middle = estimate_stage(
        np.where(jobs.has_middle_stages, jobs.middle_blocks, 0.0),
        jobs.middle_moe_blocks,
        num_tables=0.0,
        in_flight=middle_in_flight,
        logits=0.0,
    )
    last = estimate_stage(jobs.last_blocks, jobs.last_moe_blocks, num_tables, in_flight=last_in_flight, logits=logits)
    return StageMemoryTable(first, middle, last)


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
    """Return the probability that the device's memory, or with offload the CPU's, is insufficient.

    Args:
        constants: Fitted constants of memory.
        jobs: Columns of jobs.
        stage_memory: Estimated bytes of the same jobs.
    """
    return exceedance_probability(constants, memory_utilisation(constants, jobs, stage_memory), np.ones(1))


def memory_utilisation(constants: MemoryConstants, jobs: JobTable, stage_memory: StageMemoryTable) -> Column:
    """Return used / available memory of the device, or with offload of the CPU if that is fuller.

    Args:
        constants: Fitted constants of memory.
        jobs: Columns of jobs.
        stage_memory: Estimated bytes of the same jobs.
    """
    device_utilisation: Column = reserved_bytes(constants, stage_memory) / jobs.memory_bytes
    if not jobs.offload.any():
        return device_utilisation
    return np.maximum(device_utilisation, np.maximum(stage_memory.host, 1.0) / jobs.host_memory_bytes)


def exceedance_probability(constants: MemoryConstants, used_bytes: Column, memory_bytes: Column) -> Column:
    """Return the probability that a run uses more than `memory_bytes`, with a log-normal prediction error.

    Args:
        constants: Fitted constants of memory.
        used_bytes: Predicted bytes.
        memory_bytes: Available bytes.
    """
    excess = np.log(used_bytes / memory_bytes) / constants.spread
    erf_value: Column = np.vectorize(erf, otypes=[np.float64])(excess / sqrt(2))
    return 0.5 * (1 + erf_value)


def micro_batches_in_flight(jobs: JobTable) -> tuple[Column, Column, Column]:
    """Return the micro-batches whose activations the first, the second and the last stage hold at once.

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


def _state_bytes(
    constants: MemoryConstants, jobs: JobTable, blocks: Column, moe_blocks: Column, num_tables: Column | float
) -> tuple[Column, Column]:
    """Return the bytes of parameters, gradients and optimizer state on the device and in CPU memory.

    ZeRO shards them (arXiv 1910.02054, section 5).
    """
    table_parameters = jobs.vocab * jobs.width
    dense_per_block = (
        (jobs.parameters - jobs.expert_parameters - table_parameters * (2 - jobs.tied)) / jobs.layers / jobs.tp
    )
    num_moe_blocks = np.maximum(jobs.layers - jobs.dense_layers, 1)
    experts_per_block = jobs.expert_parameters / num_moe_blocks / jobs.expert_shards
    expert_replicas = jobs.expert_replicas
    dense_parameters = blocks * dense_per_block + num_tables * table_parameters / jobs.tp
    expert_parameters = moe_blocks * experts_per_block
    gathered_bytes = np.where(
        jobs.zero_stage >= 3, 2 * jobs.compute_dtype_bytes * constants.gathered_blocks * dense_per_block, 0.0
    )
    device_bytes = (
        _sharded_state_bytes(jobs, dense_parameters, jobs.shard_group_size)
        + _sharded_state_bytes(jobs, expert_parameters, expert_replicas)
        + gathered_bytes
    )
    return device_bytes, (dense_parameters / jobs.shard_group_size + expert_parameters / expert_replicas) * host_bytes(
        jobs
    )


def _sharded_state_bytes(jobs: JobTable, parameters: Column, ranks: Column) -> Column:
    shares = [np.where(jobs.zero_stage >= stage, 1 / ranks, 1.0) for stage in (3, 2, 1)]
    return parameters * sum(
        share * bytes_per_parameter for share, bytes_per_parameter in zip(shares, device_state_bytes(jobs), strict=True)
    )


def _activation_bytes(constants: MemoryConstants, jobs: JobTable) -> tuple[Column, Column]:
    """Return the saved bytes of a block, and the bytes of the block that is recomputed.

    Values are a view of the joint output of the query, key and value projection. If queries and keys are rotated, as in
    models with gated MLPs, the full output is saved in addition to the rotated tensors.
    """
    tokens = jobs.tokens
    tp = jobs.tp
    sequence_shards = np.where(jobs.sequence_parallel > 0, tp, 1.0)
    is_gated = jobs.mlp_matrices > 2
    is_fused = (jobs.fused_elementwise > 0) | (jobs.compiled > 0)
    is_gated_unfused = is_gated & ~is_fused
    queries = jobs.heads * jobs.head_dim
    values = jobs.kv_heads * (jobs.head_dim + jobs.value_dim)
    width_bytes = np.where(is_gated, constants.wide_gated_bytes, constants.wide_bytes) + np.where(
        is_gated_unfused, constants.norm_bytes, 0.0
    )
    attention_bytes = 2 * (queries + values + jobs.heads * jobs.value_dim)
    attention_bytes = attention_bytes + np.where(is_gated, 2 * (queries + jobs.kv_heads * jobs.head_dim), 0.0)
    inner_bytes = np.where(
        is_gated_unfused,
        constants.gated_separate_bytes,
        np.where(jobs.hardware_generation > 0, constants.gated_bytes, GATED_BYTES),
    )
    mlp_bytes = np.where(is_gated, inner_bytes, constants.plain_bytes) * jobs.ffn / tp
    expert_bytes = (jobs.top_k * (inner_bytes * jobs.expert_ffn + 4 * jobs.width) + inner_bytes * jobs.shared_ffn) / tp
    is_flash = jobs.attention >= AttentionKernel.FLASH_1
    separate_factor = np.where(jobs.attention == AttentionKernel.SEPARATE, constants.score_separate, 1.0)
    score_bytes = jobs.heads / tp * np.where(is_flash, 4.0, constants.score_bytes * separate_factor * jobs.sequence)

    dense_fraction = jobs.dense_layers / jobs.layers
    inner_bytes = dense_fraction * mlp_bytes + (1 - dense_fraction) * np.where(jobs.experts > 0, expert_bytes, 0.0)
    unscored_bytes = width_bytes * jobs.width / sequence_shards + attention_bytes / tp + inner_bytes
    token_scale = tokens * jobs.compute_dtype_bytes / 2  # the constants are for 16 bits
    block_bytes = token_scale * (unscored_bytes + score_bytes)
    conditions = [jobs.recompute == kind for kind in RECOMPUTING_METHODS]
    attention_block_bytes = token_scale * (attention_bytes / tp + score_bytes)
    saved_by_kind = [
        2 * token_scale * jobs.width / sequence_shards,
        token_scale * unscored_bytes,
        block_bytes * constants.operations_kept,
        block_bytes - attention_block_bytes,
    ]
    saved_bytes = np.select(conditions, saved_by_kind, block_bytes)
    recomputed_bytes = np.select(
        conditions, [block_bytes, token_scale * score_bytes, 0.0 * block_bytes, attention_block_bytes], 0.0
    )
    return saved_bytes, recomputed_bytes


def _logit_bytes(constants: MemoryConstants, jobs: JobTable, tokens: Column) -> Column:
    """Return the bytes of the logits.

    Most of them are the loss's own, which is in fp32 if products are in 16 bits.
    """
    is_fused = (jobs.hardware_generation > 0) & ((jobs.fused_elementwise > 0) | (jobs.compiled > 0))
    bytes_per_logit = (
        np.where(is_fused, constants.logit_fused_bytes, constants.logit_bytes)
        * master_weight_bytes(jobs.compute_dtype_bytes)
        / STATE_BYTES["bf16"]
    )
    gather_factor = np.where((jobs.gathers_logits > 0) & (jobs.tp > 1), constants.logit_gathered, 1.0)
    return tokens * jobs.vocab / np.where(jobs.gathers_logits > 0, 1.0, jobs.tp) * bytes_per_logit * gather_factor

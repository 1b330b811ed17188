"""Memory of a layout on the fullest rank: state, activations in flight, logits and buffers.

The estimate covers any trainer and many layouts at once. `cost.exact.rank_memory` counts Phalanx's own memory to the
byte.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import erf, sqrt

import numpy as np
from numpy.typing import NDArray

from phalanx.cost.estimate.block_activations import activation_bytes
from phalanx.cost.estimate.constants import MemoryConstants
from phalanx.cost.estimate.job_table import JobTable
from phalanx.cost.estimate.offload import device_state_bytes, host_bytes
from phalanx.cost.estimate.pipeline_schedules import SCHEDULE_ESTIMATES
from phalanx.cost.kinds import CODES, Column, select_choice
from phalanx.cost.precision import STATE_BYTES, master_weight_bytes
from phalanx.spec.formatting import GIB

DEEPSPEED_BUCKET_ELEMENTS = 5e8
"""Elements of DeepSpeed's reduce and gather buffers (reduce_bucket_size, allgather_bucket_size)."""


AT_ENDS = np.array([[1.0], [0.0], [1.0]])
"""Flag of a pipeline's first, middle and last rank: it is at an end of the pipeline."""


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Peak allocated bytes on a rank of the first, a middle and the last stage: [3, jobs]."""

    state: Column
    activations: Column
    """Bytes of all micro-batches in flight, including recomputed activations."""
    fragmented: Column
    """Part of `activations`: one micro-batch's, allocated and freed between those of other micro-batches."""
    logits: Column
    buffers: Column
    host_bytes_by_stage: Column
    """Bytes of CPU memory for offloaded state and activations; not part of `total`."""

    @property
    def total(self) -> Column:
        """Bytes of device memory by stage."""
        return self.state + self.activations + self.logits + self.buffers

    @property
    def allocated_bytes(self) -> Column:
        """Bytes of the fullest stage."""
        return self.total.max(axis=0)

    @property
    def host_bytes(self) -> Column:
        """Bytes of CPU memory for a rank of the stage that offloads most."""
        return self.host_bytes_by_stage.max(axis=0)


def estimate_memory(constants: MemoryConstants, jobs: JobTable) -> StageMemory:
    """Return the bytes of the first, a middle and the last stage.

    One block at a time is recomputed. By then, the blocks that recompute nothing have freed their activations.
    """
    blocks = np.where((AT_ENDS > 0) | jobs.has_middle_stages, jobs.blocks, 0.0)
    state, host_bytes = _state_bytes(constants, jobs, blocks)
    block = activation_bytes(constants, jobs)
    in_flight = peak_in_flight_by_stage(jobs)
    freed_bytes = blocks * (1 - jobs.recomputed) * block.unwrapped_bytes
    saved_bytes = blocks * jobs.recomputed * block.saved_bytes + freed_bytes
    recomputed_bytes = np.where(jobs.recomputed > 0, np.maximum(block.recomputed_bytes - freed_bytes, 0.0), 0.0)
    # DeepSpeed's pipeline engine saves the tensor that a stage sends, for every micro-batch in flight
    # (deepspeed/runtime/pipe/engine.py: pipe_buffers).
    saves_sent_tensor = _uses_pipeline_engine(jobs) & (jobs.pp > 1)
    sent_bytes = np.where(saves_sent_tensor, jobs.compute_dtype_bytes * jobs.tokens * jobs.width, 0.0)
    is_scattered = (in_flight > 1) & (in_flight < jobs.micro_batches)
    has_head = np.stack(np.broadcast_arrays(jobs.embedding_and_head_share_rank, False, True))
    return StageMemory(
        state=state,
        activations=in_flight * (saved_bytes + sent_bytes) + recomputed_bytes,
        fragmented=np.where(is_scattered, saved_bytes, 0.0),
        logits=np.where(has_head, _logit_bytes(constants, jobs), 0.0),
        buffers=np.tile(_buffer_bytes(constants, jobs), (3, 1)),
        host_bytes_by_stage=host_bytes + in_flight * blocks * jobs.recomputed * block.offloaded_bytes,
    )


def _uses_pipeline_engine(jobs: JobTable) -> NDArray[np.bool_]:
    return jobs.is_deepspeed & (jobs.zero_stage < 3)


def _buffer_bytes(constants: MemoryConstants, jobs: JobTable) -> Column:
    """Return the bytes of temporary tensors, of libraries, and of DeepSpeed's reduce and gather buckets."""
    working_bytes = 4 * jobs.compute_dtype_bytes * constants.working * jobs.tokens * jobs.width
    has_buckets = _uses_pipeline_engine(jobs) & (jobs.zero_stage > 0)
    bucket_bytes = np.where(has_buckets, 2 * jobs.gradient_wire_bytes * DEEPSPEED_BUCKET_ELEMENTS, 0.0)
    widest_ffn = jobs.ffn if jobs.ffn.ndim == 1 else jobs.ffn.max(axis=0)
    cast_bytes = np.where(jobs.casts_to_fp8, (jobs.tokens + widest_ffn / jobs.tp) * jobs.width, 0.0)
    return working_bytes + constants.workspace_gib * GIB + bucket_bytes + cast_bytes


def reserved_bytes(constants: MemoryConstants, memory: StageMemory) -> Column:
    """Return the device memory of the fullest stage, including the allocator's reserve and context memory.

    Model state is not temporary, so the allocator reserves nothing extra for it. In a pipeline, one micro-batch's
    backward pass frees memory between activations of others. The next forward pass cannot fully use these pieces.
    """
    temporary = constants.fragmentation * (memory.total - memory.state)
    by_stage = memory.state + temporary + constants.scattered * memory.fragmented
    return by_stage.max(axis=0) + constants.context_gib * GIB


def oom_probability(constants: MemoryConstants, jobs: JobTable, memory: StageMemory) -> Column:
    """Return the probability that the device's memory, or with offload the CPU's, is insufficient."""
    return exceedance_probability(constants, memory_utilization(constants, jobs, memory), np.ones(1))


def memory_utilization(constants: MemoryConstants, jobs: JobTable, memory: StageMemory) -> Column:
    """Return used / available memory of the device, or with offload of the CPU if that is fuller."""
    device_utilization = reserved_bytes(constants, memory) / jobs.memory_bytes
    if not (jobs.offload.any() or (jobs.recompute == CODES["offload"]).any()):
        return device_utilization
    return np.maximum(device_utilization, np.maximum(memory.host_bytes, 1.0) / jobs.host_memory_bytes)


def exceedance_probability(constants: MemoryConstants, used_bytes: Column, memory_bytes: Column) -> Column:
    """Return the probability that a run uses more than `memory_bytes`, with a log-normal error of `used_bytes`."""
    excess = np.log(used_bytes / memory_bytes) / constants.spread
    erf_value: Column = np.vectorize(erf, otypes=[np.float64])(excess / sqrt(2))
    return 0.5 * (1 + erf_value)


def peak_in_flight_by_stage(jobs: JobTable) -> Column:
    """Return the maximum number of micro-batches whose activations the first, the second and the last stage hold."""
    counts = {name: estimate.in_flight(jobs) for name, estimate in SCHEDULE_ESTIMATES.items()}
    by_stage = [{name: stages[index] for name, stages in counts.items()} for index in range(3)]
    return np.stack([np.minimum(select_choice(jobs.schedule, column, 1.0), jobs.micro_batches) for column in by_stage])


def _state_bytes(constants: MemoryConstants, jobs: JobTable, blocks: Column) -> tuple[Column, Column]:
    """Return the bytes of parameters, gradients and optimizer state on the device and in CPU memory, by stage.

    ZeRO shards them (arXiv 1910.02054, section 5). ZeRO-3 gathers the parameters of a few blocks. The first and the
    last stage have the tables of vocabulary x width, the embedding and the output projection.
    """
    table_parameters = jobs.vocab * jobs.width
    dense_per_block = (
        (jobs.parameters - jobs.expert_parameters - table_parameters * (2 - jobs.tied)) / jobs.layers / jobs.tp
    )
    num_tables = np.where(jobs.embedding_and_head_share_rank, 2 - jobs.tied, 1.0) * AT_ENDS
    dense = blocks * dense_per_block + num_tables * table_parameters / jobs.tp
    experts = jobs.moe_blocks * jobs.expert_parameters_per_block
    gathered_bytes = np.where(
        jobs.zero_stage >= 3, 2 * jobs.compute_dtype_bytes * constants.gathered_blocks * dense_per_block, 0.0
    )

    def sharded_bytes(parameters: Column, ranks: Column) -> Column:
        shares = [np.where(jobs.zero_stage >= stage, 1 / ranks, 1.0) for stage in (3, 2, 1)]
        return parameters * sum(share * size for share, size in zip(shares, device_state_bytes(jobs), strict=True))

    device_bytes = (
        sharded_bytes(dense, jobs.shard_group_size) + sharded_bytes(experts, jobs.expert_replicas) + gathered_bytes
    )
    owned_parameters = dense / jobs.shard_group_size + experts / jobs.expert_replicas
    return device_bytes, owned_parameters * host_bytes(jobs)


def frozen_bytes(jobs: JobTable) -> Column:
    """Return the bytes of the weights of a frozen model, which ZeRO-3 shards, on a rank without a pipeline."""
    shards = np.where(jobs.zero_stage >= 3, jobs.shard_group_size, 1.0)
    return jobs.compute_dtype_bytes * jobs.parameters / jobs.tp / shards


def _logit_bytes(constants: MemoryConstants, jobs: JobTable) -> Column:
    """Return the bytes of the logits and of the loss's copies of them.

    The loss computes in fp32 if products are in 16 bits, so most bytes are its copies. Phalanx keeps only the logits
    themselves, or those of one chunk and the gradient of the head's matrix.
    """
    is_fused = (jobs.hardware_generation > 0) & jobs.is_fused
    bytes_in_fp32 = np.where(is_fused, constants.logit_fused_bytes, constants.logit_bytes)
    pytorch_bytes = bytes_in_fp32 * master_weight_bytes(jobs.compute_dtype_bytes) / STATE_BYTES["bf16"]
    bytes_per_logit = np.where(jobs.is_phalanx, jobs.compute_dtype_bytes, pytorch_bytes)
    gather_factor = np.where((jobs.gathers_logits > 0) & (jobs.tp > 1), constants.logit_gathered, 1.0)
    vocab = jobs.vocab / np.where(jobs.gathers_logits > 0, 1.0, jobs.tp)
    matrix_bytes = np.where(jobs.loss_chunks > 1, jobs.gradient_bytes * vocab * jobs.width, 0.0)
    logit_bytes = jobs.tokens / jobs.loss_chunks * vocab * bytes_per_logit * gather_factor
    # In chunks, the logits of one prediction exist at a time.
    return logit_bytes * np.where(jobs.loss_chunks > 1, 1, jobs.predictions) + jobs.predictions * matrix_bytes

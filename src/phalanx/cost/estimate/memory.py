"""How much memory a layout takes on the fullest rank: model state, activations of the micro-batches in flight, logits,
buffers. Of any trainer, many layouts at once; what Phalanx itself holds is counted to the byte in `cost.memory`."""

from __future__ import annotations

from dataclasses import dataclass
from math import erf, sqrt

import numpy as np

from phalanx.cost.estimate.constants import MemoryConstants
from phalanx.cost.estimate.job_table import JobTable
from phalanx.cost.estimate.offload import device_state_bytes, host_bytes
from phalanx.cost.kinds import RECOMPUTED, AttentionKernel, Column, ScheduleKind
from phalanx.cost.precision import STATE_BYTES, master_weight_bytes

GIB = 2**30
GATED_BYTES = 8.0
"""Of a gated MLP's inner width: gate, up, the activated gate and their product, in 2 bytes each."""
DEEPSPEED_BUCKET = 5e8
"""Elements of DeepSpeed's buffers for reducing and for gathering (reduce_bucket_size, allgather_bucket_size)."""


@dataclass(frozen=True)
class StageMemory:
    """Bytes that a rank of one stage has allocated at its peak."""

    state: Column
    activations: Column
    """Of all micro-batches in flight, with what recomputation brings back."""
    fragmented: Column
    """Of these, one micro-batch's, where others' are kept while its own come and go."""
    logits: Column
    buffers: Column
    host: Column
    """In CPU memory, for what is offloaded; not in `total`."""

    @property
    def total(self) -> Column:
        return self.state + self.activations + self.logits + self.buffers


@dataclass(frozen=True)
class StageMemoryTable:
    """Bytes by stage: the first, the second (which has more blocks where the first has the embedding), the last."""

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


def estimate_memory(c: MemoryConstants, jobs: JobTable) -> StageMemoryTable:
    """Bytes of the first, the second and the last stage. DeepSpeed's pipeline engine keeps what a stage sends beside
    what its blocks keep, for all micro-batches in flight (deepspeed/runtime/pipe/engine.py: pipe_buffers)."""
    alone, together = jobs.pp == 1, jobs.embedding_and_head_share_rank
    kept, again = _activation_bytes(c, jobs)
    tokens = jobs.tokens
    logits = _logit_bytes(c, jobs, tokens)
    buffers = 4 * jobs.compute_dtype_bytes * c.working * tokens * jobs.width + c.workspace_gib * GIB
    at_first, at_second, at_last = micro_batches_in_flight(jobs)
    tables = np.where(together, 2 - jobs.tied, 1.0)
    engine = (jobs.deepspeed > 0) & (jobs.zero_stage < 3)
    buffers = buffers + np.where(engine & (jobs.zero_stage > 0), 2 * jobs.gradient_wire_bytes * DEEPSPEED_BUCKET, 0.0)
    sent = np.where(engine & ~alone, jobs.compute_dtype_bytes * tokens * jobs.width, 0.0)

    def stage(
        blocks: Column, routed: Column, tables: Column | float, flying: Column, logits: Column | float
    ) -> StageMemory:
        state, host = _state_bytes(c, jobs, blocks, routed, tables)
        mixed = np.where((flying > 1) & (flying < jobs.micro_batches), blocks * kept, 0.0)
        flown = flying * (blocks * kept + sent) + again
        return StageMemory(state, flown, mixed, np.zeros(1) + logits, buffers, host)

    begin = stage(jobs.first_blocks, jobs.first_moe_blocks, tables, at_first, np.where(together, logits, 0.0))
    second = stage(
        np.where(jobs.has_middle_stages, jobs.middle_blocks, 0.0), jobs.middle_moe_blocks, 0.0, at_second, 0.0
    )
    return StageMemoryTable(begin, second, stage(jobs.last_blocks, jobs.last_moe_blocks, tables, at_last, logits))


def reserved_bytes(c: MemoryConstants, held: StageMemoryTable) -> Column:
    """Of a device's memory on the fullest stage, with what the allocator reserves beside what comes and goes (model
    state stays where it is), and what it does not see.

    In a pipeline one micro-batch's backward pass frees memory between what others keep, in pieces that the next one's
    forward pass cannot wholly use."""
    first, second, last = (
        stage.state + c.fragmentation * (stage.total - stage.state) + c.scattered * stage.fragmented
        for stage in (held.first, held.middle, held.last)
    )
    return np.maximum(np.maximum(first, second), last) + c.context_gib * GIB


def oom_probability(c: MemoryConstants, jobs: JobTable, held: StageMemoryTable) -> Column:
    """Probability that the device's memory is not enough, or with offload the CPU's."""
    return exceedance_probability(c, memory_utilisation(c, jobs, held), np.ones(1))


def memory_utilisation(c: MemoryConstants, jobs: JobTable, held: StageMemoryTable) -> Column:
    """How many times the device's memory is used, or with offload the CPU's, whichever is fuller."""
    device: Column = reserved_bytes(c, held) / jobs.memory_bytes
    if not jobs.offload.any():
        return device
    return np.maximum(device, np.maximum(held.host, 1.0) / jobs.host_memory_bytes)


def exceedance_probability(c: MemoryConstants, used_bytes: Column, memory_bytes: Column) -> Column:
    """Probability that more is used than there is: the prediction's error is taken as log-normal."""
    excess = np.log(used_bytes / memory_bytes) / c.spread
    below: Column = np.vectorize(erf, otypes=[np.float64])(excess / sqrt(2))
    return 0.5 * (1 + below)


def micro_batches_in_flight(jobs: JobTable) -> tuple[Column, Column, Column]:
    """Micro-batches whose activations the first, the second and the last stage hold at once.

    1F1B: stage s of p holds p - s. Interleaved: the first holds p + (p-1)/v (arXiv 2205.05198, section 4.2.3), each
    further one 2/v less. ZB-H1: p on all, as 1F1B's first; ZB-H2: 2p - 1; ZB-V: p (arXiv 2401.10241 and 2405.15362).
    """
    p, m, v = jobs.pp, jobs.micro_batches, np.maximum(jobs.virtual_stages, 1)
    conditions = [
        jobs.schedule == ScheduleKind.NONE,
        jobs.schedule == ScheduleKind.INTERLEAVED,
        jobs.schedule == ScheduleKind.ZB_H1,
        jobs.schedule == ScheduleKind.ZB_H2,
        jobs.schedule == ScheduleKind.ZB_V,
        jobs.schedule == ScheduleKind.GPIPE,
    ]
    one = np.ones_like(p)
    first = np.select(conditions, [one, p + (p - 1) / v, p, 2 * p - 1, p, m], p)
    second = np.select(conditions, [one, p + (p - 3) / v, p, 2 * p - 1, p, m], np.maximum(p - 1, 1))
    last = np.select(conditions, [one, (p * (v - 1) + 1) / v, p, 2 * p - 1, p, m], one)
    return np.minimum(first, m), np.minimum(second, m), np.minimum(last, m)


def _state_bytes(
    c: MemoryConstants, jobs: JobTable, blocks: Column, with_experts: Column, tables: Column | float
) -> tuple[Column, Column]:
    """Parameters, gradients and optimizer state, of which ZeRO leaves a share (arXiv 1910.02054, section 5): on the
    device, and in CPU memory."""
    table = jobs.vocab * jobs.width
    dense = (jobs.parameters - jobs.expert_parameters - table * (2 - jobs.tied)) / jobs.layers / jobs.tp
    routed = np.maximum(jobs.layers - jobs.dense_layers, 1)
    experts = jobs.expert_parameters / routed / jobs.expert_shards
    apart = jobs.expert_replicas
    shared, of_experts = blocks * dense + tables * table / jobs.tp, with_experts * experts
    gathered = np.where(jobs.zero_stage >= 3, 2 * jobs.compute_dtype_bytes * c.gathered_blocks * dense, 0.0)
    kept = (
        _sharded_parameters(jobs, shared, jobs.shard_group_size)
        + _sharded_parameters(jobs, of_experts, apart)
        + gathered
    )
    return kept, (shared / jobs.shard_group_size + of_experts / apart) * host_bytes(jobs)


def _sharded_parameters(jobs: JobTable, parameters: Column, ranks: Column) -> Column:
    shares = [np.where(jobs.zero_stage >= stage, 1 / ranks, 1.0) for stage in (3, 2, 1)]
    return parameters * sum(share * kind for share, kind in zip(shares, device_state_bytes(jobs), strict=True))


def _activation_bytes(c: MemoryConstants, jobs: JobTable) -> tuple[Column, Column]:
    """Bytes that a block keeps for the backward pass, and those of the block that is computed again. Values are a view
    of what one product makes with queries and keys: where these are rotated, as in models with gated MLPs, all of its
    output stays beside them."""
    tokens, tp = jobs.tokens, jobs.tp
    parted = np.where(jobs.sequence_parallel > 0, tp, 1.0)
    gated, fused = jobs.mlp_matrices > 2, (jobs.fused_elementwise > 0) | (jobs.compiled > 0)
    separate = gated & ~fused
    queries, values = jobs.heads * jobs.head_dim, jobs.kv_heads * (jobs.head_dim + jobs.value_dim)
    wide = np.where(gated, c.wide_gated_bytes, c.wide_bytes) + np.where(separate, c.norm_bytes, 0.0)
    attention = 2 * (queries + values + jobs.heads * jobs.value_dim)
    attention = attention + np.where(gated, 2 * (queries + jobs.kv_heads * jobs.head_dim), 0.0)
    inner = np.where(
        separate, c.gated_separate_bytes, np.where(jobs.hardware_generation > 0, c.gated_bytes, GATED_BYTES)
    )
    mlp = np.where(gated, inner, c.plain_bytes) * jobs.ffn / tp
    experts = (jobs.top_k * (inner * jobs.expert_ffn + 4 * jobs.width) + inner * jobs.shared_ffn) / tp
    flash = jobs.attention >= AttentionKernel.FLASH_1
    apart = np.where(jobs.attention == AttentionKernel.SEPARATE, c.score_separate, 1.0)
    scores = jobs.heads / tp * np.where(flash, 4.0, c.score_bytes * apart * jobs.sequence)

    share = jobs.dense_layers / jobs.layers
    inner = share * mlp + (1 - share) * np.where(jobs.experts > 0, experts, 0.0)
    rest = wide * jobs.width / parted + attention / tp + inner
    each = tokens * jobs.compute_dtype_bytes / 2  # the constants are of 16 bits
    all_of_it = each * (rest + scores)
    kinds = [jobs.recompute == kind for kind in RECOMPUTED]
    inside = each * (attention / tp + scores)
    less = [2 * each * jobs.width / parted, each * rest, all_of_it * c.operations_kept, all_of_it - inside]
    kept = np.select(kinds, less, all_of_it)
    again = np.select(kinds, [all_of_it, each * scores, 0.0 * all_of_it, inside], 0.0)
    return kept, again


def _logit_bytes(c: MemoryConstants, jobs: JobTable, tokens: Column) -> Column:
    """Most of them the loss's own, which is in fp32 where products are in 16 bits."""
    fused = (jobs.hardware_generation > 0) & ((jobs.fused_elementwise > 0) | (jobs.compiled > 0))
    each = (
        np.where(fused, c.logit_fused_bytes, c.logit_bytes)
        * master_weight_bytes(jobs.compute_dtype_bytes)
        / STATE_BYTES["bf16"]
    )
    gathered = np.where((jobs.gathers_logits > 0) & (jobs.tp > 1), c.logit_gathered, 1.0)
    return tokens * jobs.vocab / np.where(jobs.gathers_logits > 0, 1.0, jobs.tp) * each * gathered

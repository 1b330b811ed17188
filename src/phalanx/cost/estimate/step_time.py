"""How long one optimizer step takes: blocks and ends of every stage, the schedule's bubble, sends, data-parallel
exchanges as far as the backward pass does not hide them, and the update."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from phalanx.cost.estimate.block_time import BlockTime, block_seconds, smooth_max
from phalanx.cost.estimate.collective_time import network_bandwidth, p2p_seconds, ring_seconds
from phalanx.cost.estimate.constants import TimeConstants
from phalanx.cost.estimate.job_table import JobTable
from phalanx.cost.estimate.kernel_time import matmul_seconds, memory_pass_seconds
from phalanx.cost.estimate.offload import offload_seconds, upload_seconds
from phalanx.cost.kinds import Column, ScheduleKind


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step, by what they go to; they add up to `total`."""

    compute: Column
    """The slowest stage's micro-batches, one after the other."""
    bubble: Column
    send: Column
    data_parallel: Column
    """Exchanges of gradients and parameters that are seen."""
    update: Column
    """By the device."""
    offload: Column
    """Copies from and to where state rests, and the update there."""
    waiting: Column
    """For the slowest of many nodes."""
    exchange: Column
    """Of `compute`, tensor, context and expert parallelism's exchanges: not added once more."""

    @property
    def total(self) -> Column:
        inside = self.compute + self.bubble + self.send
        return inside + self.data_parallel + self.update + self.offload + self.waiting


@dataclass(frozen=True)
class StageTime:
    """Seconds of one micro-batch in a stage."""

    forward: Column
    backward: Column
    weight_grad: Column

    @property
    def forward_backward(self) -> Column:
        return self.forward + self.backward

    def __add__(self, other: StageTime) -> StageTime:
        return StageTime(
            self.forward + other.forward, self.backward + other.backward, self.weight_grad + other.weight_grad
        )

    def __sub__(self, other: StageTime) -> StageTime:
        return self + other.scaled(-1.0)

    def scaled(self, count: Column | float) -> StageTime:
        """So many of it, one after another."""
        return StageTime(count * self.forward, count * self.backward, count * self.weight_grad)


@dataclass(frozen=True)
class LayerTimes:
    """What stages are made of."""

    embedding: StageTime
    dense: StageTime
    """A block with an MLP."""
    routed: StageTime
    """A block with experts."""
    head: StageTime
    """With the loss."""


def step_seconds(c: TimeConstants, jobs: JobTable) -> StepTime:
    """Seconds of a step by its parts."""
    dense, routed = _blocks(c, jobs)
    parts = _parts(c, jobs, dense, routed)
    slowest, middle = _stages(jobs, parts)
    once = parts.dense.scaled(jobs.dense_layers) + parts.routed.scaled(jobs.layers - jobs.dense_layers)
    once = once + parts.embedding + parts.head
    p, m, v = jobs.pp, jobs.micro_batches, np.maximum(jobs.virtual_stages, 1)
    bubble = _bubble(jobs, once - slowest)
    engine = np.where((jobs.deepspeed > 0) & (jobs.pp > 1), c.deepspeed, 1.0)
    compute = m * slowest.forward_backward * engine
    compute, bubble = _on_shared_cores(jobs, compute, bubble, m * once.forward_backward / p * engine)
    send = _sends(c, jobs, m, v)
    seen = _data_parallel(c, jobs, middle)
    update = _update(c, jobs) + c.step_seconds
    offload = offload_seconds(c, jobs, owned_parameters(jobs))
    waiting = (
        (compute + bubble + send)
        * c.straggler_factor
        * np.log2(np.maximum(jobs.ranks / jobs.pp / jobs.fast_link_ranks_per_stage, 1))
    )
    share = jobs.dense_layers / jobs.layers
    exchange = m * jobs.middle_blocks * (share * dense.exchange + (1 - share) * routed.exchange) * engine
    return StepTime(compute, bubble, send, seen, update, offload, waiting, exchange)


def layer_seconds(c: TimeConstants, jobs: JobTable) -> LayerTimes:
    """Seconds of a micro-batch in each part of the model."""
    return _parts(c, jobs, *_blocks(c, jobs))


def _blocks(c: TimeConstants, jobs: JobTable) -> tuple[BlockTime, BlockTime]:
    dense, routed = block_seconds(c, jobs)
    experts = jobs.expert_parameters / np.maximum(jobs.layers - jobs.dense_layers, 1) / jobs.expert_shards
    experts = experts / jobs.expert_replicas
    return _with_zero3_communication(c, jobs, dense, np.zeros(1)), _with_zero3_communication(c, jobs, routed, experts)


def _with_zero3_communication(c: TimeConstants, jobs: JobTable, block: BlockTime, experts: Column) -> BlockTime:
    """With ZeRO-3's gathers of the next block's parameters beside each pass, and its scatters of gradients. What rests
    elsewhere is brought before it is gathered, this rank's `experts` too.

    DeepSpeed gathers parameter by parameter, each by one ring that leaves a node by one network card, and few of them
    ahead of their use: they hide worse than a block's gathered at once.
    """
    sharded, singly = jobs.zero_stage >= 3, (jobs.deepspeed > 0) & (jobs.ranks > jobs.fast_link_domain)
    parameters = (jobs.parameters - jobs.expert_parameters) / jobs.layers / jobs.tp
    ranks = np.where(sharded, jobs.shard_group_size, 1.0)
    copies = np.where(sharded, jobs.dp * jobs.cp / ranks, 1.0)

    def exchange(size_bytes: Column) -> Column:
        together = ring_seconds(c, jobs, size_bytes, ranks, jobs.tp)
        return np.where(singly, size_bytes / network_bandwidth(c, jobs), together)

    gather, scatter = exchange(jobs.compute_dtype_bytes * parameters), exchange(jobs.gradient_wire_bytes * parameters)
    gather = gather + upload_seconds(jobs, parameters / ranks + experts)
    between = ring_seconds(
        c, jobs, jobs.gradient_wire_bytes * parameters / ranks, copies, jobs.tp * ranks, reduces=True
    )
    after = gather + scatter + between
    forward, backward = (
        np.where(
            jobs.comm_uses_compute_cores > 0,
            pass_ + sent,
            np.where(singly, smooth_max(pass_, sent, 2), smooth_max(pass_, sent, 6)),
        )
        for pass_, sent in ((block.forward, gather), (block.backward, after))
    )
    return BlockTime(
        np.where(sharded, forward, block.forward),
        np.where(sharded, backward, block.backward),
        block.weight,
        block.exchange,
    )


def _parts(c: TimeConstants, jobs: JobTable, dense: BlockTime, routed: BlockTime) -> LayerTimes:
    tokens = jobs.tokens
    head = matmul_seconds(c, jobs, tokens, jobs.vocab / jobs.tp, jobs.width, linear=False)
    loss = _loss(c, jobs, tokens)
    embedding = memory_pass_seconds(c, jobs, jobs.compute_dtype_bytes * 6 * tokens * jobs.width)
    none = np.zeros(1)
    return LayerTimes(
        StageTime(embedding / 2, embedding / 2, none),
        StageTime(dense.forward, dense.backward, dense.weight),
        StageTime(routed.forward, routed.backward, routed.weight),
        StageTime(head + 0.4 * loss, 2 * head + 0.6 * loss, none),
    )


def _stages(jobs: JobTable, parts: LayerTimes) -> tuple[StageTime, StageTime]:
    """The slowest rank, and one between the first, with the embedding, and the last, with the head."""

    def stage(blocks: Column, routed: Column) -> StageTime:
        return parts.dense.scaled(blocks - routed) + parts.routed.scaled(routed)

    together = jobs.embedding_and_head_share_rank
    begin = stage(jobs.first_blocks, jobs.first_moe_blocks) + parts.embedding
    middle = stage(jobs.middle_blocks, jobs.middle_moe_blocks)
    end = (
        stage(jobs.last_blocks, jobs.last_moe_blocks)
        + parts.head
        + parts.embedding.scaled(np.where(together, 1.0, 0.0))
    )
    slowest = _elementwise_slower(end, begin, ~together)
    return _elementwise_slower(slowest, middle, jobs.has_middle_stages), middle


def _elementwise_slower(one: StageTime, other: StageTime, there: NDArray[np.bool_]) -> StageTime:
    """Of two stages the one that takes longer, if the other is there."""
    chosen = there & (other.forward_backward > one.forward_backward)
    return StageTime(*(np.where(chosen, getattr(other, f.name), getattr(one, f.name)) for f in fields(StageTime)))


def _loss(c: TimeConstants, jobs: JobTable, tokens: Column) -> Column:
    """Of both passes: over a rank's share of the logits, or over all of them where ranks gather the vocabulary."""
    whole = (jobs.gathers_logits > 0) & (jobs.tp > 1)
    logits = jobs.compute_dtype_bytes * tokens * jobs.vocab
    gather = np.where(whole, ring_seconds(c, jobs, logits, jobs.tp, 1.0), 0.0)
    return gather + memory_pass_seconds(c, jobs, np.where(whole, logits, logits / jobs.tp) * c.head_passes)


def _bubble(jobs: JobTable, others: StageTime) -> Column:
    """Idle seconds of the slowest stage: `others` is one micro-batch's way through all other stages; F, B and W are of
    all of them.

    1F1B and GPipe wait for it once; interleaved for a v-th of it (arXiv 2104.04473, section 2.2); split backward
    passes fill it with gradients of weights (arXiv 2401.10241, section 2.3, and 2405.15362): of ZB-H1 are left
    F + B - W, of ZB-H2 max(F, F + B - 2W), of ZB-V max(F, B) / 2. Where the optimizer's checks are postponed, the next
    step begins in the ramp of the last one, and ZB-H2's 2p - 1 forward passes at the start fill what is left of it but
    B - F, where gradients of weights do not.
    """
    v, late = np.maximum(jobs.virtual_stages, 1), jobs.optimizer_post_validation > 0
    F, W = others.forward, others.weight_grad
    B = others.backward - W
    idle: Column = np.select(
        [
            jobs.schedule == ScheduleKind.NONE,
            jobs.schedule == ScheduleKind.INTERLEAVED,
            jobs.schedule == ScheduleKind.ZB_H1,
            jobs.schedule == ScheduleKind.ZB_H2,
            jobs.schedule == ScheduleKind.ZB_V,
        ],
        [
            0.0 * others.forward_backward,
            others.forward_backward / v,
            np.maximum(F + B - W, 0.0),
            np.where(late, np.clip(B - F, 0.0, np.maximum(F + B - 2 * W, 0.0)), np.maximum(F, F + B - 2 * W)),
            np.where(late, np.maximum(B - F, 0.0), np.maximum(F, B)) / 2,
        ],
        others.forward_backward,
    )
    return idle


def _on_shared_cores(jobs: JobTable, slowest: Column, bubble: Column, mean: Column) -> tuple[Column, Column]:
    """Compute and bubble where ranks share cores: one that waits leaves its core to the others, so that a step takes
    what all stages compute, or, if that is longer, the way through the schedule at a whole core's speed."""
    alone = (jobs.ranks_per_core <= 1) | (jobs.pp == 1)
    through = (slowest + bubble) / jobs.ranks_per_core
    return np.where(alone, slowest, mean), np.where(alone, bubble, smooth_max(mean, through) - mean)


def _sends(c: TimeConstants, jobs: JobTable, m: Column, v: Column) -> Column:
    """Seconds that stages wait for one another's messages: a forward and a backward one for every micro-batch and every
    chunk. Tensor-parallel ranks share a message where they share its tokens, and in Megatron-LM and DeepSpeed's engine
    always (arXiv 2104.04473, section 4.1; deepspeed/runtime/pipe/engine.py: is_pipe_partitioned). Each interleaved
    chunk waits for its message unless sends were made to run ahead, as does DeepSpeed's engine
    (deepspeed/runtime/pipe/p2p.py: blocking sends)."""
    tokens = jobs.tokens
    parted = (jobs.sequence_parallel > 0) | (jobs.schedule == ScheduleKind.INTERLEAVED) | (jobs.scatter_gather_p2p > 0)
    one = p2p_seconds(c, jobs, jobs.compute_dtype_bytes * tokens * jobs.width / np.where(parted, jobs.tp, 1.0))
    interleaved = jobs.schedule == ScheduleKind.INTERLEAVED
    waits = (jobs.deepspeed > 0) | (interleaved & (jobs.hardware_generation == 0) & (jobs.overlap_tp == 0))
    seen = np.where(waits, 1.0, c.exposed_p2p_fraction)
    chunks = np.where(interleaved, v, np.where(jobs.schedule == ScheduleKind.ZB_V, 2.0, 1.0))
    return np.where(jobs.pp > 1, 2 * seen * one * (m + jobs.pp - 1) * chunks, 0.0)


def _data_parallel(c: TimeConstants, jobs: JobTable, stage: StageTime) -> Column:
    """Seconds of gradients' and parameters' exchanges that passes do not hide. Parameters are gathered after the
    update: where they hide, it is in the next step's forward pass."""
    dense, experts = parameters_per_rank(jobs)
    ranks = jobs.dp * jobs.cp
    bucket = np.where(jobs.overlap_grad_reduce > 0, c.bucket_bytes / 2, np.inf)
    calls, expert_calls = np.maximum(1, dense / bucket), np.maximum(1, experts / bucket)
    sharded, whole = (jobs.zero_stage >= 1) & (jobs.zero_stage < 3), jobs.shard_group_size >= ranks
    scatter = ring_seconds(c, jobs, jobs.gradient_wire_bytes * dense, ranks, jobs.tp, calls=calls)
    reduce = ring_seconds(c, jobs, jobs.gradient_wire_bytes * dense, ranks, jobs.tp, reduces=True, calls=calls)
    gather = ring_seconds(c, jobs, jobs.compute_dtype_bytes * dense, jobs.shard_group_size, jobs.tp, calls=calls)
    apart = jobs.expert_replicas
    both = (jobs.gradient_wire_bytes + jobs.compute_dtype_bytes) * experts
    of_experts = ring_seconds(c, jobs, both, apart, jobs.expert_shards, calls=expert_calls)
    all_of_it = np.where(sharded & whole, scatter, reduce) + np.where(sharded, gather, 0.0)
    all_of_it = all_of_it + np.where(jobs.experts > 0, of_experts, 0.0)
    all_of_it = np.where(jobs.zero_stage >= 3, 0.0, all_of_it)
    afterwards = np.where(sharded & (jobs.overlap_param_gather == 0), gather, 0.0)
    room = np.where(
        (jobs.overlap_grad_reduce > 0) & (jobs.comm_uses_compute_cores == 0),
        c.overlap * (stage.backward + stage.forward / 2),
        0.0,
    )
    earlier = (jobs.grad_reductions_per_step - 1) * _exposed(c, scatter, room)
    return _exposed(c, all_of_it - afterwards, room) + afterwards + earlier


def _exposed(c: TimeConstants, exchange: Column, room: Column) -> Column:
    """Of an exchange that runs beside the backward pass, what is seen of it."""
    hidden: Column = np.minimum(exchange, room)
    return exchange - hidden + c.overlap_leak * hidden


def parameters_per_rank(jobs: JobTable) -> tuple[Column, Column]:
    """Parameters of a stage between the ends that all data-parallel ranks share, and those of its experts."""
    dense = (jobs.parameters - jobs.expert_parameters) / (jobs.tp * jobs.pp)
    return dense, jobs.expert_parameters / (jobs.expert_shards * jobs.pp)


def owned_parameters(jobs: JobTable) -> Column:
    """Parameters that a rank of such a stage updates."""
    dense, experts = parameters_per_rank(jobs)
    return np.where(
        jobs.zero_stage >= 1, dense / jobs.shard_group_size + experts / jobs.expert_replicas, dense + experts
    )


def _update(c: TimeConstants, jobs: JobTable) -> Column:
    """Seconds of the optimizer, where the device runs it, of the gradients' norm and of setting them to zero."""
    dense, _ = parameters_per_rank(jobs)
    owned = np.where(jobs.offload > 0, 0.0, owned_parameters(jobs))
    return memory_pass_seconds(c, jobs, 2 * c.optimizer_passes * owned + 4 * dense)

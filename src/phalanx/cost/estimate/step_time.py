"""Time of an optimizer step.

Blocks, embedding, head, the schedule's bubble, sends, exposed data-parallel communication, and the update.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from phalanx.cost.estimate.block_time import StageTime, block_seconds, smooth_max
from phalanx.cost.estimate.collective_time import network_bandwidth, p2p_seconds, ring_seconds
from phalanx.cost.estimate.constants import TimeConstants
from phalanx.cost.estimate.job_table import JobTable
from phalanx.cost.estimate.kernel_time import matmul_seconds, memory_pass_seconds
from phalanx.cost.estimate.offload import offload_seconds, upload_seconds
from phalanx.cost.estimate.update_time import data_parallel_seconds, owned_parameters, update_seconds
from phalanx.cost.kinds import Column, ScheduleKind


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step by part: the parts are disjoint, and `total` is their sum."""

    compute: Column
    """Micro-batches of the slowest stage, one after another, without exposed communication."""
    exchange: Column
    """Exposed communication of tensor, context and expert parallelism in `compute`'s micro-batches."""
    bubble: Column
    send: Column
    data_parallel: Column
    """Exposed communication of gradients and parameters: after backward, or with ZeRO-3 within passes."""
    update: Column
    """Update on the device."""
    offload: Column
    """Exposed copies of offloaded state, and the update of that state on the host."""
    waiting: Column
    """Time that nodes wait for the slowest of them."""

    @property
    def total(self) -> Column:
        """Seconds of the step."""
        total: Column = sum(getattr(self, part) for part in PARTS)
        return total


PARTS = tuple(part.name for part in fields(StepTime))


@dataclass(frozen=True)
class LayerTimes:
    """Times of the layers of a model, of which stages consist."""

    embedding: StageTime
    dense: StageTime
    """Block with a dense MLP."""
    routed: StageTime
    """Block with experts."""
    head: StageTime
    """Output projection and loss."""


def step_seconds(constants: TimeConstants, jobs: JobTable) -> StepTime:
    """Return the seconds of a step, by part."""
    dense, routed = _block_times(constants, jobs)
    layer_times = _make_layer_times(constants, jobs, dense, routed=routed)
    slowest, middle = _slowest_and_middle_stages(jobs, layer_times)
    all_layers = layer_times.dense.scaled(jobs.dense_layers) + layer_times.routed.scaled(
        jobs.layers - jobs.dense_layers
    )
    all_layers = all_layers + layer_times.embedding + layer_times.head
    p = jobs.pp
    m = jobs.micro_batches
    v = np.maximum(jobs.virtual_stages, 1)
    engine_factor = np.where((jobs.deepspeed > 0) & (jobs.pp > 1), constants.deepspeed, 1.0)
    busy, bubble = _adjust_for_shared_cores(
        jobs,
        slowest.scaled(m * engine_factor),
        all_layers.scaled(m * engine_factor / p),
        bubble=_bubble_seconds(jobs, all_layers - slowest),
    )
    send = _pipeline_send_seconds(constants, jobs, m, v=v)
    data_parallel = data_parallel_seconds(constants, jobs, middle) + busy.sharding
    update = update_seconds(constants, jobs) + constants.step_seconds
    offload = offload_seconds(constants, jobs, owned_parameters(jobs)) + busy.upload
    waiting = (
        (busy.forward_backward + bubble + send)
        * constants.straggler_factor
        * np.log2(np.maximum(jobs.ranks / jobs.pp / jobs.fast_link_ranks_per_stage, 1))
    )
    return StepTime(
        busy.compute,
        busy.exchange,
        bubble,
        send=send,
        data_parallel=data_parallel,
        update=update,
        offload=offload,
        waiting=waiting,
    )


def layer_seconds(constants: TimeConstants, jobs: JobTable) -> LayerTimes:
    """Return the seconds of a micro-batch in each part of the model."""
    return _make_layer_times(constants, jobs, *_block_times(constants, jobs))


def _block_times(constants: TimeConstants, jobs: JobTable) -> tuple[StageTime, StageTime]:
    dense, routed = block_seconds(constants, jobs)
    experts = jobs.expert_parameters / np.maximum(jobs.layers - jobs.dense_layers, 1) / jobs.expert_shards
    return _add_zero3_communication(constants, jobs, dense, experts=np.zeros(1)), _add_zero3_communication(
        constants, jobs, routed, experts=experts
    )


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


def _add_zero3_communication(constants: TimeConstants, jobs: JobTable, block: StageTime, experts: Column) -> StageTime:
    """Return `block` with ZeRO-3's gathers and reduce-scatters, which overlap with the passes.

    Each pass gathers the next block's parameters. `experts` is the number of parameters of a rank's experts, which
    ranks with the same experts share. DeepSpeed prefetches few parameters at a time, which hides worse than a full
    block.
    """
    parameters = (jobs.parameters - jobs.expert_parameters) / jobs.layers / jobs.tp
    ranks = jobs.shard_group_size
    copies = jobs.dp * jobs.cp / jobs.shard_group_size
    expert_ranks = np.clip(ranks * jobs.tp / jobs.expert_shards, 1, jobs.expert_replicas)
    sharding = _sharding_seconds(
        constants, jobs, parameters, ranks=ranks, copies=copies, stride=jobs.tp
    ) + _sharding_seconds(
        constants,
        jobs,
        experts,
        ranks=expert_ranks,
        copies=jobs.expert_replicas / expert_ranks,
        stride=jobs.expert_shards,
    )
    gather = sharding.gather + sharding.upload
    upload = sharding.upload
    backward_exchange = gather + sharding.scatter

    def exposed_seconds(pass_seconds: Column, exchange_seconds: Column) -> Column:
        return np.where(
            jobs.comm_uses_compute_cores > 0,
            exchange_seconds,
            np.where(
                _gathers_singly(jobs),
                smooth_max(pass_seconds, exchange_seconds, 2),
                smooth_max(pass_seconds, exchange_seconds, 6),
            )
            - pass_seconds,
        )

    forward = exposed_seconds(block.forward, gather)
    backward = exposed_seconds(block.backward, backward_exchange)
    uploads = upload * (forward / np.maximum(gather, 1e-30) + backward / np.maximum(backward_exchange, 1e-30))
    sharded = replace(
        block,
        forward=block.forward + forward,
        backward=block.backward + backward,
        sharding=forward + backward - uploads,
        upload=uploads,
    )
    return block.replaced_where(jobs.zero_stage >= 3, sharded)


def _make_layer_times(constants: TimeConstants, jobs: JobTable, dense: StageTime, routed: StageTime) -> LayerTimes:
    tokens = jobs.tokens
    head = matmul_seconds(constants, jobs, tokens, n=jobs.vocab / jobs.tp, k=jobs.width, linear=False)
    loss = _loss_seconds(constants, jobs, tokens)
    embedding = memory_pass_seconds(constants, jobs, jobs.compute_dtype_bytes * 6 * tokens * jobs.width)
    zero = np.zeros(1)
    return LayerTimes(
        StageTime(embedding / 2, embedding / 2, zero),
        dense,
        routed,
        head=StageTime(head + 0.4 * loss, 2 * head + 0.6 * loss, zero),
    )


def _slowest_and_middle_stages(jobs: JobTable, layer_times: LayerTimes) -> tuple[StageTime, StageTime]:
    """Return the times of the slowest rank, and of a rank with neither embedding nor head."""

    def sum_stage(blocks: Column, moe_blocks: Column) -> StageTime:
        return layer_times.dense.scaled(blocks - moe_blocks) + layer_times.routed.scaled(moe_blocks)

    shares_rank = jobs.embedding_and_head_share_rank
    first = sum_stage(jobs.first_blocks, jobs.first_moe_blocks) + layer_times.embedding
    middle = sum_stage(jobs.middle_blocks, jobs.middle_moe_blocks)
    last = (
        sum_stage(jobs.last_blocks, jobs.last_moe_blocks)
        + layer_times.head
        + layer_times.embedding.scaled(np.where(shares_rank, 1.0, 0.0))
    )
    slowest = _elementwise_slower(last, first, ~shares_rank)
    return _elementwise_slower(slowest, middle, jobs.has_middle_stages), middle


def _elementwise_slower(stage: StageTime, other: StageTime, exists: NDArray[np.bool_]) -> StageTime:
    """Return the slower of two stages, row by row, where `other` exists."""
    return stage.replaced_where(exists & (other.forward_backward > stage.forward_backward), other)


def _loss_seconds(constants: TimeConstants, jobs: JobTable, tokens: Column) -> Column:
    """Return the seconds of the loss, forward and backward.

    The loss reads a rank's shard of the logits, or all logits if ranks gather the vocabulary.
    """
    gathers_vocab = (jobs.gathers_logits > 0) & (jobs.tp > 1)
    logits = jobs.compute_dtype_bytes * tokens * jobs.vocab
    gather = np.where(gathers_vocab, ring_seconds(constants, jobs, logits, ranks=jobs.tp, stride=1.0), 0.0)
    return gather + memory_pass_seconds(
        constants, jobs, np.where(gathers_vocab, logits, logits / jobs.tp) * constants.head_passes
    )


def _bubble_seconds(jobs: JobTable, others: StageTime) -> Column:
    """Return the idle seconds of the slowest stage.

    `others` is the time of one micro-batch in all other stages together; F, B and W are sums over these stages. 1F1B
    and GPipe wait for that time once, interleaved schedules for 1/v of it (arXiv 2104.04473, section 2.2). Split
    backward passes fill it with gradients of weights (arXiv 2401.10241, section 2.3, and 2405.15362). The remainder is
    F + B - W for ZB-H1, max(F, F + B - 2W) for ZB-H2, and max(F, B) / 2 for ZB-V. With postponed optimizer checks, the
    next step starts in the ramp of the last one. The 2p - 1 forward passes at the start of ZB-H2 then fill the rest,
    except B - F where gradients of weights do not cover it.
    """
    v = np.maximum(jobs.virtual_stages, 1)
    is_post_validated = jobs.optimizer_post_validation > 0
    F = others.forward
    W = others.weight_grad
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
            np.where(
                is_post_validated, np.clip(B - F, 0.0, np.maximum(F + B - 2 * W, 0.0)), np.maximum(F, F + B - 2 * W)
            ),
            np.where(is_post_validated, np.maximum(B - F, 0.0), np.maximum(F, B)) / 2,
        ],
        others.forward_backward,
    )
    return idle


def _adjust_for_shared_cores(
    jobs: JobTable, slowest: StageTime, mean: StageTime, bubble: Column
) -> tuple[StageTime, Column]:
    """Return a step's passes and bubble for ranks that share cores.

    A waiting rank leaves its core to the others. A step therefore takes the compute of all stages or, if longer, the
    schedule's critical path at the speed of a full core.
    """
    shares_core = (jobs.ranks_per_core > 1) & (jobs.pp > 1)
    schedule_seconds = (slowest.forward_backward + bubble) / jobs.ranks_per_core
    shared_bubble = smooth_max(mean.forward_backward, schedule_seconds) - mean.forward_backward
    return slowest.replaced_where(shares_core, mean), np.where(shares_core, shared_bubble, bubble)


def _pipeline_send_seconds(constants: TimeConstants, jobs: JobTable, m: Column, v: Column) -> Column:
    """Return the seconds that stages wait for messages: forward and backward, per micro-batch and chunk.

    Tensor-parallel ranks split a message if they split its tokens, and always in Megatron-LM and DeepSpeed's engine
    (arXiv 2104.04473, section 4.1; deepspeed/runtime/pipe/engine.py: is_pipe_partitioned). Interleaved chunks wait for
    their message unless sends run ahead, as does DeepSpeed's engine (deepspeed/runtime/pipe/p2p.py: blocking sends).
    """
    tokens = jobs.tokens
    is_message_split = (
        (jobs.sequence_parallel > 0) | (jobs.schedule == ScheduleKind.INTERLEAVED) | (jobs.scatter_gather_p2p > 0)
    )
    message_seconds = p2p_seconds(
        constants, jobs, jobs.compute_dtype_bytes * tokens * jobs.width / np.where(is_message_split, jobs.tp, 1.0)
    )
    interleaved = jobs.schedule == ScheduleKind.INTERLEAVED
    is_blocking = (jobs.deepspeed > 0) | (interleaved & (jobs.hardware_generation == 0) & (jobs.overlap_tp == 0))
    exposed_fraction = np.where(is_blocking, 1.0, constants.exposed_p2p_fraction)
    chunks = np.where(interleaved, v, np.where(jobs.schedule == ScheduleKind.ZB_V, 2.0, 1.0))
    return np.where(jobs.pp > 1, 2 * exposed_fraction * message_seconds * (m + jobs.pp - 1) * chunks, 0.0)

"""Time of an optimizer step.

Blocks, embedding, head, the schedule's bubble, sends, exposed data-parallel communication, and the update.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import reduce
from operator import add

import numpy as np
from numpy.typing import NDArray

from phalanx.cost.estimate.block_time import StageTime, block_seconds, smooth_max
from phalanx.cost.estimate.collective_time import p2p_seconds, ring_seconds
from phalanx.cost.estimate.constants import TimeConstants
from phalanx.cost.estimate.job_table import JobTable
from phalanx.cost.estimate.kernel_time import matmul_seconds, memory_pass_seconds
from phalanx.cost.estimate.offload import add_input_copies, input_copy_seconds, offload_seconds
from phalanx.cost.estimate.pipeline_schedules import SCHEDULE_ESTIMATES
from phalanx.cost.estimate.update_time import data_parallel_seconds, owned_parameters, update_seconds
from phalanx.cost.estimate.zero3_time import add_zero3_communication
from phalanx.cost.kinds import CODES, Column, select_choice


@dataclass(frozen=True, kw_only=True)
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
    """Exposed copies of offloaded state and activations, and the update of that state on the host."""
    waiting: Column
    """Time that nodes wait for the slowest of them."""

    @property
    def total(self) -> Column:
        """Seconds of the step."""
        total: Column = sum(getattr(self, part) for part in PARTS)
        return total


PARTS = tuple(part.name for part in fields(StepTime))


@dataclass(frozen=True, kw_only=True)
class LayerTimes:
    """Times of a model's layers. A stage's time is the sum over its layers."""

    embedding: StageTime
    dense: StageTime
    """Block with a dense MLP."""
    routed: StageTime
    """Block with experts."""
    head: StageTime
    """Output projection and loss."""

    def blocks(self, dense: Column, routed: Column) -> StageTime:
        """Return the times of these numbers of blocks."""
        return self.dense.scaled(dense) + self.routed.scaled(routed)


def step_seconds(constants: TimeConstants, jobs: JobTable) -> StepTime:
    """Return the seconds of a step, by part.

        T_step   = m t_max + T_bubble + T_send + T_dp + T_update + T_offload + T_wait

        t_s      = F_s + B_s                                passes of one micro-batch in pipeline stage s
        T_bubble = (sum of t_s over p stages - t_max) / v   1F1B (v = 1) and interleaved 1F1B (arXiv 2104.04473)
        T_wait   = w (m t_max + T_bubble + T_send) log2(d)

    m is the number of micro-batches, p of stages, v of chunks per stage, and d of fast-link domains that wait for each
    other. t_max is the time of the slowest stage, and w the straggler factor. `_bubble_seconds` has the bubbles of
    other schedules. T_dp is in `data_parallel_seconds`, and T_send in `_pipeline_send_seconds`.
    """
    layers = layer_seconds(constants, jobs)
    plain = layer_seconds_without_recomputation(constants, jobs, layers)
    slowest, middle = _slowest_and_middle_stages(jobs, layers, plain)
    blocks = _combine_block_times(layers, plain, jobs.mean_recomputed, jobs.layers, jobs.layers - jobs.dense_layers)
    all_stages = blocks + layers.embedding + layers.head
    engine_factor = np.where(jobs.is_deepspeed & (jobs.pp > 1), constants.deepspeed, 1.0)
    passes, bubble = _adjust_for_shared_cores(
        jobs,
        slowest=slowest.scaled(jobs.micro_batches * engine_factor),
        mean=all_stages.scaled(jobs.micro_batches * engine_factor / jobs.pp),
        bubble=_bubble_seconds(jobs, all_stages - slowest),
    )
    send = _pipeline_send_seconds(constants, jobs)
    fast_link_domains = np.maximum(jobs.ranks / jobs.pp / jobs.fast_link_ranks_per_stage, 1)
    return StepTime(
        compute=passes.compute,
        exchange=passes.exchange,
        bubble=bubble,
        send=send,
        data_parallel=data_parallel_seconds(constants, jobs, middle) + passes.sharding,
        update=update_seconds(constants, jobs) + constants.step_seconds,
        offload=offload_seconds(constants, jobs, owned_parameters(jobs))
        + passes.upload
        + jobs.micro_batches * input_copy_seconds(jobs),
        waiting=(passes.forward_backward + bubble + send) * constants.straggler_factor * np.log2(fast_link_domains),
    )


def add_teacher(time: StepTime, constants: TimeConstants, teachers: JobTable, pp: Column) -> StepTime:
    """Return the time of a step in which a teacher runs its forward passes, whose jobs are without pipelines.

    In a pipeline of `pp` stages each has an equal part of its layers; the bubble of its passes is left out. The loss
    has six exponentials of each logit in place of two, hence twice its time more."""
    layers = layer_seconds(constants, teachers)
    blocks = layers.blocks(teachers.dense_layers, teachers.layers - teachers.dense_layers)
    product = matmul_seconds(constants, teachers, teachers.tokens, teachers.vocab / teachers.tp, teachers.width)
    read_bytes = teachers.compute_dtype_bytes * teachers.tokens * teachers.vocab / teachers.tp
    loss = 2 * constants.head_passes * memory_pass_seconds(constants, teachers, read_bytes)
    forward = teachers.micro_batches / pp * (layers.embedding.forward + blocks.forward + product + loss)
    return replace(time, compute=time.compute + forward)


def layer_seconds(constants: TimeConstants, jobs: JobTable) -> LayerTimes:
    """Return the seconds of a micro-batch in each part of the model; those of blocks are means over kinds of layers."""
    dense_by_kind: list[StageTime] = []
    routed_by_kind: list[StageTime] = []
    for kind in jobs.by_kind():
        dense, routed = (add_input_copies(kind, block) for block in block_seconds(constants, kind))
        dense_by_kind.append(dense.scaled(kind.kind_dense_share))
        routed_by_kind.append(routed.scaled(kind.kind_routed_share))
    dense = reduce(add, dense_by_kind)
    routed = reduce(add, routed_by_kind)
    embedding = memory_pass_seconds(constants, jobs, jobs.compute_dtype_bytes * 6 * jobs.tokens * jobs.width)
    return LayerTimes(
        embedding=StageTime(forward=embedding / 2, backward=embedding / 2, weight_grad=np.zeros(1)),
        dense=add_zero3_communication(constants, jobs, dense, experts=np.zeros(1)),
        routed=add_zero3_communication(constants, jobs, routed, jobs.expert_parameters_per_block),
        head=_estimate_head_time(constants, jobs),
    )


def layer_seconds_without_recomputation(constants: TimeConstants, jobs: JobTable, layers: LayerTimes) -> LayerTimes:
    """Return the seconds of a micro-batch in blocks that recompute nothing; `layers` if no job has such blocks."""
    if (jobs.mean_recomputed == 1).all():
        return layers
    return layer_seconds(constants, replace(jobs, recompute=np.full_like(jobs.recompute, CODES["none"])))


def _combine_block_times(
    layers: LayerTimes, plain: LayerTimes, recomputed: Column, blocks: Column, moe_blocks: Column
) -> StageTime:
    """Return the time of all blocks if a fraction `recomputed` of them recomputes activations."""
    dense = blocks - moe_blocks
    if plain is layers:
        return layers.blocks(dense, moe_blocks)
    return layers.blocks(recomputed * dense, recomputed * moe_blocks) + plain.blocks(
        (1 - recomputed) * dense, (1 - recomputed) * moe_blocks
    )


def _estimate_head_time(constants: TimeConstants, jobs: JobTable) -> StageTime:
    """Return the times of the output projection and of the loss.

    The loss reads a rank's shard of the logits, or all logits if ranks gather the vocabulary. If the loss is computed
    in chunks, its backward pass runs within the forward pass, and each chunk adds to the gradient of the head's matrix.
    """
    product = matmul_seconds(constants, jobs, jobs.tokens, jobs.vocab / jobs.tp, jobs.width, linear=False)
    gathers_vocab = (jobs.gathers_logits > 0) & (jobs.tp > 1)
    logits = jobs.compute_dtype_bytes * jobs.tokens * jobs.vocab
    gather = np.where(gathers_vocab, ring_seconds(constants, jobs, logits, jobs.tp, stride=1.0), 0.0)
    read_bytes = np.where(gathers_vocab, logits, logits / jobs.tp) * constants.head_passes
    loss = gather + memory_pass_seconds(constants, jobs, read_bytes)
    matrix_bytes = jobs.gradient_bytes * jobs.vocab / jobs.tp * jobs.width
    sums = (jobs.loss_chunks - 1) * memory_pass_seconds(constants, jobs, 2 * matrix_bytes)
    gradients = product + jobs.head_gradient_share * product
    is_chunked = jobs.loss_chunks > 1
    chunked = product + gradients + loss + jobs.head_gradient_share * sums
    return StageTime(
        forward=jobs.predictions * np.where(is_chunked, chunked, product + 0.4 * loss),
        backward=jobs.predictions * np.where(is_chunked, 0.0, gradients + 0.6 * loss),
        weight_grad=np.zeros(1),
    )


def _slowest_and_middle_stages(jobs: JobTable, layers: LayerTimes, plain: LayerTimes) -> tuple[StageTime, StageTime]:
    """Return the times of the slowest rank, and of a rank with neither embedding nor head."""
    first, middle, last = (
        _combine_block_times(layers, plain, recomputed, blocks, moe_blocks)
        for recomputed, blocks, moe_blocks in zip(jobs.recomputed, jobs.blocks, jobs.moe_blocks, strict=True)
    )
    shares_rank = jobs.embedding_and_head_share_rank
    first += layers.embedding
    last = last + layers.head + layers.embedding.scaled(np.where(shares_rank, 1.0, 0.0))

    def slower(stage: StageTime, candidate: StageTime, exists: NDArray[np.bool_]) -> StageTime:
        return stage.replaced_where(exists & (candidate.forward_backward > stage.forward_backward), candidate)

    return slower(slower(last, first, ~shares_rank), middle, jobs.has_middle_stages), middle


def _bubble_seconds(jobs: JobTable, others: StageTime) -> Column:
    """Return the idle seconds of the slowest stage, with the times of one micro-batch in all other stages together."""
    by_schedule = {name: estimate.bubble_seconds(jobs, others) for name, estimate in SCHEDULE_ESTIMATES.items()}
    return select_choice(jobs.schedule, by_schedule, 0.0)


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


def _pipeline_send_seconds(constants: TimeConstants, jobs: JobTable) -> Column:
    """Return the seconds that stages wait for messages, forward and backward.

        T_send = 2 e c (m + p - 1) t_message

    m is the number of micro-batches, p of stages, c of chunks per rank, and e the exposed fraction of a message.
    Tensor-parallel ranks split a message if they split its tokens, and always in Megatron-LM and DeepSpeed's engine
    (arXiv 2104.04473, section 4.1; deepspeed/runtime/pipe/engine.py: is_pipe_partitioned). Interleaved chunks wait for
    their message unless sends run ahead, as does DeepSpeed's engine (deepspeed/runtime/pipe/p2p.py: blocking sends).
    """
    is_interleaved = jobs.schedule == CODES["interleaved"]
    is_message_split = (jobs.sequence_parallel > 0) | is_interleaved | (jobs.scatter_gather_p2p > 0)
    message_shards = np.where(is_message_split, jobs.tp, 1.0)
    message_bytes = jobs.compute_dtype_bytes * jobs.tokens * jobs.width / message_shards
    message_seconds = p2p_seconds(constants, jobs, message_bytes)
    is_blocking = jobs.is_deepspeed | (is_interleaved & (jobs.hardware_generation == 0) & (jobs.overlap_tp == 0))
    exposed_fraction = np.where(is_blocking, 1.0, constants.exposed_p2p_fraction)
    chunks_in_other_schedules = np.where(jobs.is_v_shaped, 2.0, 1.0)
    chunks = np.where(is_interleaved, np.maximum(jobs.virtual_stages, 1), chunks_in_other_schedules)
    num_slots = jobs.micro_batches + jobs.pp - 1
    return np.where(jobs.pp > 1, 2 * exposed_fraction * message_seconds * num_slots * chunks, 0.0)

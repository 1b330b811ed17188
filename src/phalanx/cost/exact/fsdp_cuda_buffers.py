"""Buffers in which FSDP2's units gather and reduce on CUDA, on separate streams (torch/distributed/fsdp)."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.cost.exact.comm_buffer_peak import FIRST_BLOCK, CommBufferPeak
from phalanx.cost.exact.fsdp_units import backward_fsdp_units, fsdp_unit_sizes
from phalanx.cost.precision import COMPUTE_BYTES, STATE_BYTES
from phalanx.program.rank_tensors import RankTensors
from phalanx.spec.layout import EMBEDDINGS, Layout
from phalanx.spec.parameter_shapes import num_elements
from phalanx.spec.precision import Precision
from phalanx.spec.run import RunSpec


@dataclass(frozen=True, kw_only=True)
class CudaUnits:
    """Elements of FSDP2's units on a rank: parameters of all ranks with padding, gradients without."""

    root: int
    """Parameters outside blocks of a root that owns them; 0 if they are two units."""
    embedding: int
    head: int
    """Parameters of the unit of the final norm and head; 0 without it."""
    block: int
    """Parameters of the largest block, without experts that have ranks of their own."""
    expert: int
    """Parameters of the largest unit of such experts, which are inside blocks; 0 without them."""
    stacks: int
    """Parameters of the stacks of matrices of a unit whose rows are sharded."""
    largest_stack: int
    num_blocks: int
    all_blocks: int
    """Parameters of all blocks together."""
    root_head_gradient: int
    """Gradients of the root before the first block's backward pass: all except an untied embedding's."""
    head_gradient: int
    """Gradients of the unit of the final norm and head."""
    unit_gradient: int
    """Gradients of the largest unit in blocks."""
    last_reduced: int
    """Parameters of the unit whose gradients are the last: the root, or the embedding."""
    last_gradient: int
    """Gradients of that unit."""

    def gathered_ahead(self, layout: Layout) -> int:
        """Return the elements that are prefetched while a block computes: a (block + expert).

        With experts it is one block less, because their own gather is the first. The number `a` is
        `layout.fsdp_prefetch`, or all other blocks if they stay gathered."""
        num_ahead = min(max(1, layout.fsdp_prefetch), self.num_blocks)
        if not layout.reshard_after_forward:
            num_ahead = max(num_ahead, self.num_blocks - 1)
        return num_ahead * (self.block + self.expert) - (self.block if self.expert else 0)


@dataclass(frozen=True, kw_only=True)
class CudaBuffers:
    """Bytes of FSDP2's buffers on CUDA, by phase of a block's backward pass."""

    before: int
    """Gathered parameters at the start of the backward pass, with those that are prefetched during the head's."""
    head_done: int
    """After the backward pass of the head's unit: its gradients and their reduction, and prefetched parameters."""
    root: int
    """During the full backward pass: parameters that stay gathered, and gradients of a root's head."""
    ahead: int
    """Prefetched parameters, on the gather stream; part of the phases below."""
    expert_copy: int
    """Buffer of experts on the gather stream, while it is copied out; part of `copied_out`."""
    copied_out: int
    """While a block computes: its parameters, and prefetched parameters."""
    stack_copy: int
    """In addition to `copied_out`, before the block computes: copies of stacks in the order of ranks, and the buffer of
    the gather; 0 without such stacks."""
    gradients_ready: int
    """After a block: its gradients in addition to its parameters."""
    between: int
    """Between two blocks: prefetched parameters, and the reduction of the last completed unit."""
    block_sum: int
    """Reduction of the previous block, until the current block starts its own."""
    head_sum: int
    """Reduction of the head's unit, until the first block starts its own."""
    last_sum: int
    """Gradients of the root or of the embedding, and their reduction, at the end."""
    earlier_last_sum: int
    """Sent gradients of the root or of the embedding of the previous micro-batch, until the next reduction."""


def _cuda_units(rank: RankTensors, layout: Layout) -> CudaUnits:
    owned = fsdp_unit_sizes(rank.dense, layout, rank.shards)
    gradients = fsdp_unit_sizes(rank.dense, layout, 1)
    expert_gradients = fsdp_unit_sizes(rank.expert, layout, 1)
    stacks = [unit.stacks for unit in backward_fsdp_units(rank, layout)]
    late_names = [name for name in rank.dense if name.startswith(EMBEDDINGS)]
    late = sum(num_elements(rank.dense[name]) for name in late_names) if "head.weight" in rank.dense else 0
    return CudaUnits(
        root=owned.root * rank.shards,
        embedding=owned.embedding * rank.shards,
        head=owned.head * rank.shards,
        block=max(owned.blocks, default=0) * rank.shards,
        expert=fsdp_unit_sizes(rank.expert, layout, rank.expert_shards).largest * rank.expert_shards,
        stacks=max(map(sum, stacks)),
        largest_stack=max(max(sizes, default=0) for sizes in stacks),
        num_blocks=len(owned.blocks),
        all_blocks=sum(owned.blocks) * rank.shards,
        root_head_gradient=max(0, gradients.root - late),
        head_gradient=gradients.head,
        unit_gradient=max([*gradients.blocks, *expert_gradients.blocks, expert_gradients.root]),
        last_reduced=owned.last_reduced * rank.shards,
        last_gradient=gradients.last_reduced,
    )


def _cuda_buffers(
    rank: RankTensors, units: CudaUnits, layout: Layout, precision: Precision, accumulates: bool
) -> CudaBuffers:
    """Return the buffers of each phase, with c bytes per element in compute and s per element in a sum.

    copied_out      = c (block + ahead + expert) + c expert
    gradients_ready = c (block + ahead + expert) + c unit_gradient + c largest_stack
    between         = c (block + ahead) + sum of experts, or without experts of the block
    sum of a unit   = s (unit + unit / ranks): sent gradients, and the received shard"""
    compute = COMPUTE_BYTES[precision]
    state = STATE_BYTES[precision]
    ahead = units.gathered_ahead(layout)
    kept = units.root + (0 if layout.reshard_after_forward else units.embedding)
    start = kept + (ahead if layout.reshard_after_forward else units.all_blocks)
    gathered = units.block + ahead + units.expert
    block_sum = _sum_bytes(units.block, rank.shards, precision)
    head_sum = _sum_bytes(units.head, rank.shards, precision)
    last_block_sum = _sum_bytes(units.expert, rank.expert_shards, precision) if units.expert else block_sum
    return CudaBuffers(
        before=compute * (start + units.head),
        head_done=compute * (start + units.head_gradient) + head_sum,
        root=compute * (kept + units.root_head_gradient),
        ahead=compute * ahead,
        expert_copy=compute * units.expert,
        copied_out=compute * (gathered + units.expert),
        stack_copy=compute * (units.stacks + (0 if units.expert else units.block)) if units.stacks else 0,
        gradients_ready=compute * (gathered + units.unit_gradient + units.largest_stack),
        between=compute * (units.block + ahead) + last_block_sum,
        block_sum=block_sum,
        head_sum=head_sum,
        last_sum=compute * units.last_gradient + _sum_bytes(units.last_reduced, rank.shards, precision),
        earlier_last_sum=state * units.last_reduced if accumulates else 0,
    )


def _sum_bytes(elements: int, ranks: int, precision: Precision) -> int:
    """Return s (n + n / ranks): bytes of the gradients that a unit sends and of the received shard."""
    return STATE_BYTES[precision] * (elements + elements // ranks)


def cuda_buffer_peaks(
    rank: RankTensors, layout: Layout, precision: Precision, accumulates: bool
) -> list[CommBufferPeak]:
    """Return the buffers on CUDA (torch/distributed/fsdp/_fully_shard of PyTorch 2.11).

    A block's gathered buffer exists until the block computes, when it is copied out. The next block's buffer exists by
    then (`FSDPParamGroup.wait_for_unshard`, `pre_backward`). After a block, its parameters are freed, and its gradients
    are copied to the send buffer in the dtype of the sum (`post_backward`, `foreach_reduce`). That buffer exists until
    the next unit is at that point. The last unit's buffer exists from a micro-batch to the first reduction of the next
    one (`accumulates`; it is freed after the last only, `_root_post_backward_final_callback`). The first reduction is
    that of the head's unit, or of a block if the root has the head. Experts with ranks of their own are units in
    blocks.

    Args:
        rank: Tensors of the rank.
        accumulates: True if a step has several micro-batches.
    """
    units = _cuda_units(rank, layout)
    buffers = _cuda_buffers(rank, units, layout, precision=precision, accumulates=accumulates)

    def computes(fraction: float, sums: int) -> CommBufferPeak:
        size = buffers.root + buffers.copied_out + sums
        return CommBufferPeak(
            backward_fraction=fraction,
            bytes=size,
            moment="inside_block",
            gather_stream_bytes=buffers.ahead + buffers.expert_copy,
        )

    def copies_out(fraction: float, sums: int) -> CommBufferPeak:
        return between(fraction, buffers.root + buffers.copied_out + buffers.stack_copy + sums)

    def between(fraction: float, size: int) -> CommBufferPeak:
        return CommBufferPeak(
            backward_fraction=fraction, bytes=size, moment="after_block", gather_stream_bytes=buffers.ahead
        )

    def is_done(fraction: float, sums: int) -> CommBufferPeak:
        return between(fraction, buffers.root + buffers.gradients_ready + sums)

    block = 1 / max(1, units.num_blocks)  # of the backward pass
    until_done = block / 2 if units.expert else block
    second_done = is_done(min(1.0, block + until_done), buffers.block_sum)
    end_bytes = max(second_done.bytes, buffers.root + buffers.between, buffers.last_sum)
    first_sum = buffers.head_sum if units.head else buffers.earlier_last_sum
    return [
        CommBufferPeak(backward_fraction=0.0, bytes=buffers.before + buffers.earlier_last_sum, moment="backward_start"),
        *([between(FIRST_BLOCK, buffers.head_done)] if units.head else []),
        computes(FIRST_BLOCK, first_sum),
        is_done(until_done, first_sum),
        between(block, buffers.root + buffers.between),
        computes(block, buffers.block_sum),
        second_done,
        computes(1 - block, buffers.block_sum),
        *([copies_out(FIRST_BLOCK, first_sum), copies_out(1 - block, buffers.block_sum)] if units.stacks else []),
        CommBufferPeak(backward_fraction=1.0, bytes=end_bytes, moment="after_block"),
    ]


@dataclass(frozen=True)
class StreamBuffers:
    """Bytes on FSDP2's CUDA streams, whose memory the allocator keeps separate."""

    side_streams: int
    """Peak on the gather and reduce streams."""
    largest_sum: int
    """Largest buffer of a reduction, on the compute stream."""


@dataclass(frozen=True, kw_only=True)
class _OwnedUnits:
    """Elements that a rank owns, with padding, of FSDP2's units."""

    outside: int
    """Elements of the largest unit outside blocks."""
    block: int
    """Elements of the largest block."""
    expert: int
    """Elements of the largest unit of experts that have ranks of their own; 0 without them."""
    all_units: int
    shards: int
    expert_shards: int

    @property
    def gathered_outside(self) -> int:
        """Elements of the largest unit outside blocks on all ranks together."""
        return self.outside * self.shards

    @property
    def gathered_block(self) -> int:
        """Elements of the largest block on all ranks together."""
        return self.block * self.shards

    @property
    def gathered_expert(self) -> int:
        """Elements of the largest unit of experts on all ranks together."""
        return self.expert * self.expert_shards


def fsdp_stream_buffers(rank: RankTensors, run: RunSpec, accumulation: int) -> StreamBuffers:
    """Return the peak bytes per stream.

    Args:
        rank: Tensors of the rank.
        run: Run whose layout and precision apply.
        accumulation: Micro-batches per step.
    """
    compute_bytes = COMPUTE_BYTES[run.training.precision]
    state_bytes = STATE_BYTES[run.training.precision]
    units = _owned_units(rank, run.layout)
    gathered = _gather_stream_elements(units)
    summed = _reduce_stream_elements(units, offloads=run.layout.offload != "none", accumulates=accumulation > 1)
    return StreamBuffers(
        side_streams=compute_bytes * gathered + state_bytes * summed,
        largest_sum=state_bytes * max(units.gathered_outside, units.gathered_block, units.gathered_expert),
    )


def _owned_units(rank: RankTensors, layout: Layout) -> _OwnedUnits:
    sizes = fsdp_unit_sizes(rank.dense, layout, rank.shards)
    experts = fsdp_unit_sizes(rank.expert, layout, rank.expert_shards)
    return _OwnedUnits(
        outside=max(sizes.root, sizes.embedding, sizes.head),
        block=max(sizes.blocks, default=0),
        expert=experts.largest,
        all_units=sizes.total + experts.total,
        shards=rank.shards,
        expert_shards=rank.expert_shards,
    )


def _gather_stream_elements(units: _OwnedUnits) -> int:
    """Return the peak of the gather stream: a unit outside blocks and a block, or experts of two blocks, and a shard.

    Buffers of experts and of blocks alternate: half of one is lost between them.
    """
    experts_of_two_blocks = 2 * units.gathered_expert + units.gathered_expert // 2
    copied_shard = max(units.block, units.expert)
    largest = max(units.gathered_outside, experts_of_two_blocks, units.gathered_block)
    return largest + units.gathered_block + copied_shard


def _reduce_stream_elements(units: _OwnedUnits, offloads: bool, accumulates: bool) -> int:
    """Return the peak of the reduce stream: a step's gradients, and one unit's that are added or copied to the CPU."""
    gradients = 0 if offloads else units.all_units
    largest_unit = max(units.outside, units.block, units.expert) if accumulates or offloads else 0
    return gradients + largest_unit

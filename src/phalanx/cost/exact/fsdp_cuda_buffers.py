"""Buffers in which FSDP2's units gather and reduce on CUDA, on separate streams (torch/distributed/fsdp)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.cost.exact.comm_buffer_peak import CommBufferPeak
from phalanx.cost.precision import COMPUTE_BYTES, STATE_BYTES
from phalanx.program.fsdp_units import EMBEDDING, HEAD, ROOT, FsdpUnit, fsdp_units
from phalanx.program.rank_tensors import RankTensors
from phalanx.spec.layout import EMBEDDINGS, Layout
from phalanx.spec.parameter_shapes import num_elements
from phalanx.spec.precision import Precision
from phalanx.spec.run import RunSpec

NO_UNIT = FsdpUnit(name=ROOT, ranks=1, shapes={})


class CudaUnits:
    """FSDP2's units on a rank by their place, with `NO_UNIT` for units that a model or layout does not have."""

    def __init__(self, rank: RankTensors, layout: Layout) -> None:
        self.all = fsdp_units(rank, layout)
        by_name = {unit.name: unit for unit in self.all}
        self.root = by_name.get(ROOT, NO_UNIT)
        self.embedding = by_name.get(EMBEDDING, NO_UNIT)
        self.head = by_name.get(HEAD, NO_UNIT)
        self.blocks = [unit for unit in self.all if unit.is_in_blocks and not unit.is_inner]
        self.block = _largest(self.blocks)
        self.expert = _largest([unit for unit in self.all if unit.is_inner])

    @property
    def last(self) -> FsdpUnit:
        """The unit whose gradients are the last of a backward pass."""
        return self.root if self.root.owned else self.embedding

    @property
    def root_head_gradient(self) -> int:
        """Gradients of the root before the first block's backward pass: all except an untied embedding's."""
        is_tied = "head.weight" not in self.root.shapes
        late = [shape for name, shape in self.root.shapes.items() if name.startswith(EMBEDDINGS) and not is_tied]
        return self.root.gradients - sum(map(num_elements, late))

    def gathered_ahead(self, layout: Layout) -> int:
        """Return the elements that are prefetched while a block computes: a (block + expert).

        With experts it is one block less, because their own gather is the first. The number `a` is
        `layout.fsdp_prefetch`, or all other blocks if they stay gathered."""
        num_blocks = len(self.blocks)
        num_ahead = min(max(1, layout.fsdp_prefetch), num_blocks)
        if not layout.reshard_after_forward:
            num_ahead = max(num_ahead, num_blocks - 1)
        ahead = num_ahead * (self.block.gathered + self.expert.gathered)
        return ahead - (self.block.gathered if self.expert.owned else 0)


def _largest(units: Sequence[FsdpUnit]) -> FsdpUnit:
    return max(units, key=lambda unit: unit.owned, default=NO_UNIT)


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


def _cuda_buffers(units: CudaUnits, layout: Layout, precision: Precision, accumulates: bool) -> CudaBuffers:
    """Return the buffers of each phase, with c bytes per element in compute.

    copied_out      = c (block + ahead + expert) + c expert
    gradients_ready = c (block + ahead + expert) + c largest gradient of a unit in blocks + c largest stack
    between         = c (block + ahead) + sum of experts, or without experts of the block"""
    compute = COMPUTE_BYTES[precision]
    ahead = units.gathered_ahead(layout)
    kept = units.root.gathered + (0 if layout.reshard_after_forward else units.embedding.gathered)
    start = kept + (ahead if layout.reshard_after_forward else sum(unit.gathered for unit in units.blocks))
    gathered = units.block.gathered + ahead + units.expert.gathered
    stacks = max(sum(unit.stacks) for unit in units.all)
    largest_stack = max(max(unit.stacks, default=0) for unit in units.all)
    largest_gradient = max((unit.gradients for unit in units.all if unit.is_in_blocks), default=0)
    block_sum = _sum_bytes(units.block, precision)
    head_sum = _sum_bytes(units.head, precision)
    return CudaBuffers(
        before=compute * (start + units.head.gathered),
        head_done=compute * (start + units.head.gradients) + head_sum,
        root=compute * (kept + units.root_head_gradient),
        ahead=compute * ahead,
        expert_copy=compute * units.expert.gathered,
        copied_out=compute * (gathered + units.expert.gathered),
        stack_copy=compute * (stacks + (0 if units.expert.owned else units.block.gathered)) if stacks else 0,
        gradients_ready=compute * (gathered + largest_gradient + largest_stack),
        between=compute * (units.block.gathered + ahead)
        + (_sum_bytes(units.expert, precision) if units.expert.owned else block_sum),
        block_sum=block_sum,
        head_sum=head_sum,
        last_sum=compute * units.last.gradients + _sum_bytes(units.last, precision),
        earlier_last_sum=STATE_BYTES[precision] * units.last.gathered if accumulates else 0,
    )


def _sum_bytes(unit: FsdpUnit, precision: Precision) -> int:
    """Return the bytes of the gradients that a unit sends and of the received shard."""
    return STATE_BYTES[precision] * (unit.gathered + unit.owned)


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
    units = CudaUnits(rank, layout)
    buffers = _cuda_buffers(units, layout, precision, accumulates)

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

    block = 1 / max(1, len(units.blocks))  # of the backward pass
    until_done = block / 2 if units.expert.owned else block
    second_done = is_done(min(1.0, block + until_done), buffers.block_sum)
    end_bytes = max(second_done.bytes, buffers.root + buffers.between, buffers.last_sum)
    first_sum = buffers.head_sum if units.head.owned else buffers.earlier_last_sum
    return [
        CommBufferPeak(backward_fraction=0.0, bytes=buffers.before + buffers.earlier_last_sum, moment="backward_start"),
        *([between(0.0, buffers.head_done)] if units.head.owned else []),
        computes(0.0, first_sum),
        is_done(until_done, first_sum),
        between(block, buffers.root + buffers.between),
        computes(block, buffers.block_sum),
        second_done,
        computes(1 - block, buffers.block_sum),
        *([copies_out(0.0, first_sum), copies_out(1 - block, buffers.block_sum)] if buffers.stack_copy else []),
        CommBufferPeak(backward_fraction=1.0, bytes=end_bytes, moment="after_block"),
    ]


@dataclass(frozen=True)
class StreamBuffers:
    """Bytes on FSDP2's CUDA streams, whose memory the allocator keeps separate."""

    side_streams: int
    """Peak on the gather and reduce streams."""
    largest_sum: int
    """Largest buffer of a reduction, on the compute stream."""


def fsdp_stream_buffers(rank: RankTensors, run: RunSpec, accumulation: int) -> StreamBuffers:
    """Return the peak bytes per stream.

    Args:
        rank: Tensors of the rank.
        run: Run whose layout and precision apply.
        accumulation: Micro-batches per step.
    """
    state_bytes = STATE_BYTES[run.training.precision]
    units = CudaUnits(rank, run.layout)
    outside = _largest([units.root, units.embedding, units.head])
    gathered = _gather_stream_elements(units, outside)
    summed = _reduce_stream_elements(
        units, outside, offloads=run.layout.offload != "none", accumulates=accumulation > 1
    )
    return StreamBuffers(
        side_streams=COMPUTE_BYTES[run.training.precision] * gathered + state_bytes * summed,
        largest_sum=state_bytes * max(outside.gathered, units.block.gathered, units.expert.gathered),
    )


def _gather_stream_elements(units: CudaUnits, outside: FsdpUnit) -> int:
    """Return the peak of the gather stream: a unit outside blocks and a block, or experts of two blocks, and a shard.

    Buffers of experts and of blocks alternate: half of one is lost between them.
    """
    experts_of_two_blocks = 2 * units.expert.gathered + units.expert.gathered // 2
    copied_shard = max(units.block.owned, units.expert.owned)
    largest = max(outside.gathered, experts_of_two_blocks, units.block.gathered)
    return largest + units.block.gathered + copied_shard


def _reduce_stream_elements(units: CudaUnits, outside: FsdpUnit, offloads: bool, accumulates: bool) -> int:
    """Return the peak of the reduce stream: a step's gradients, and one unit's that are added or copied to the CPU."""
    gradients = 0 if offloads else sum(unit.owned for unit in units.all)
    largest_unit = max(outside.owned, units.block.owned, units.expert.owned) if accumulates or offloads else 0
    return gradients + largest_unit

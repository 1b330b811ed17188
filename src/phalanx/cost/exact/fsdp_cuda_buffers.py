"""Buffers in which FSDP2's units gather and reduce on CUDA, on separate streams (torch/distributed/fsdp)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.cost.exact.comm_buffer_peak import CommBufferPeak
from phalanx.cost.precision import COMPUTE_BYTES, STATE_BYTES
from phalanx.program.fsdp_units import EMBEDDING, HEAD, ROOT, FsdpUnit, fsdp_units, late_parameters
from phalanx.program.rank_tensors import RankTensors
from phalanx.spec.layout import Layout
from phalanx.spec.parameter_shapes import num_elements
from phalanx.spec.precision import Precision
from phalanx.spec.resolved_run import ResolvedRun

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
        late = (self.root.trained[name] for name in late_parameters(self.root))
        return self.root.gradients - sum(map(num_elements, late))

    def gathered_ahead(self, layout: Layout, size: int) -> int:
        """Return the bytes that are prefetched while a block computes: a (block + expert).

        With experts it is one block less, because their own gather is the first. The number `a` is
        `layout.fsdp_prefetch`, or all other blocks if they stay gathered."""
        num_blocks = len(self.blocks)
        num_ahead = min(max(1, layout.fsdp_prefetch), num_blocks)
        if not layout.reshard_after_forward:
            num_ahead = max(num_ahead, num_blocks - 1)
        block = self.block.gathered_bytes(size)
        ahead = num_ahead * (block + self.expert.gathered_bytes(size))
        return ahead - (block if self.expert.owned else 0)


def _largest(units: Sequence[FsdpUnit]) -> FsdpUnit:
    return max(units, key=lambda unit: unit.owned, default=NO_UNIT)


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
    """
    units = CudaUnits(rank, layout)
    compute = COMPUTE_BYTES[precision]
    state = STATE_BYTES[precision]

    def reduction(unit: FsdpUnit) -> int:
        """Return the bytes of the gradients that a unit sends, and of the received shard."""
        return state * (unit.reduced + unit.owned_gradients)

    # Prefetched parameters are on the gather stream, with the buffer of experts until it has been copied out.
    ahead = units.gathered_ahead(layout, compute)
    expert = units.expert.gathered_bytes(compute)
    kept = units.root.gathered_bytes(compute)
    kept += 0 if layout.reshard_after_forward else units.embedding.gathered_bytes(compute)
    of_blocks = sum(unit.gathered_bytes(compute) for unit in units.blocks)
    start = kept + (ahead if layout.reshard_after_forward else of_blocks)
    # During the full backward pass, a root's parameters stay gathered, and the gradients of its head exist.
    root = kept + compute * units.root_head_gradient
    of_block = units.block.gathered_bytes(compute)
    gathered = root + of_block + ahead + expert
    block_sum = reduction(units.block)
    head_sum = reduction(units.head)
    # Stacks are copied in the order of ranks before the block computes, while the buffer of their gather exists.
    stacks = max(unit.stack_bytes(compute) for unit in units.all)
    stack_copy = stacks + (0 if expert else of_block)
    largest_stack = max(max(unit.trained_stacks, default=0) for unit in units.all)
    largest_gradient = max((unit.gradients for unit in units.all if unit.is_in_blocks), default=0)
    gradients = compute * (largest_gradient + largest_stack)
    between_blocks = root + of_block + ahead + (reduction(units.expert) if expert else block_sum)
    # What the last micro-batch has sent last exists until the first reduction of this one.
    earlier_sum = state * units.last.reduced if accumulates else 0
    last_sum = compute * units.last.gradients + reduction(units.last)

    def computes(fraction: float, sums: int) -> CommBufferPeak:
        return CommBufferPeak(
            backward_fraction=fraction,
            bytes=gathered + expert + sums,
            moment="inside_block",
            gather_stream_bytes=ahead + expert,
        )

    def between(fraction: float, size: int) -> CommBufferPeak:
        return CommBufferPeak(backward_fraction=fraction, bytes=size, moment="after_block", gather_stream_bytes=ahead)

    def copies_out(fraction: float, sums: int) -> CommBufferPeak:
        return between(fraction, gathered + expert + stack_copy + sums)

    def is_done(fraction: float, sums: int) -> CommBufferPeak:
        return between(fraction, gathered + gradients + sums)

    block = 1 / max(1, len(units.blocks))  # of the backward pass
    until_done = block / 2 if expert else block
    second_done = is_done(min(1.0, block + until_done), block_sum)
    end_bytes = max(second_done.bytes, between_blocks, last_sum)
    head = units.head.gathered_bytes(compute)
    first_sum = head_sum if head else earlier_sum
    return [
        CommBufferPeak(backward_fraction=0.0, bytes=start + head + earlier_sum, moment="backward_start"),
        *([between(0.0, start + compute * units.head.gradients + head_sum)] if head else []),
        computes(0.0, first_sum),
        is_done(until_done, first_sum),
        between(block, between_blocks),
        computes(block, block_sum),
        second_done,
        computes(1 - block, block_sum),
        *([copies_out(0.0, first_sum), copies_out(1 - block, block_sum)] if stacks else []),
        CommBufferPeak(backward_fraction=1.0, bytes=end_bytes, moment="after_block"),
    ]


@dataclass(frozen=True)
class StreamBuffers:
    """Bytes on FSDP2's CUDA streams, whose memory the allocator keeps separate."""

    side_streams: int
    """Peak on the gather and reduce streams."""
    largest_sum: int
    """Largest buffer of a reduction, on the compute stream."""


def fsdp_stream_buffers(resolved: ResolvedRun, rank: RankTensors) -> StreamBuffers:
    """Return the peak bytes per stream."""
    run = resolved.run
    state_bytes = STATE_BYTES[run.training.precision]
    compute_bytes = COMPUTE_BYTES[run.training.precision]
    units = CudaUnits(rank, run.layout)
    outside = _largest([units.root, units.embedding, units.head])
    block = units.block
    expert = units.expert
    # A unit outside blocks and a block, or experts of two blocks, and a shard. Buffers of experts and of blocks
    # alternate: half of one is lost between them.
    outside_bytes, block_bytes, expert_bytes = (unit.gathered_bytes(compute_bytes) for unit in (outside, block, expert))
    gathered_bytes = max(outside_bytes, 2 * expert_bytes + expert_bytes // 2, block_bytes) + block_bytes
    copied_shard = max(unit.owned_bytes(compute_bytes) for unit in (block, expert))
    # A step's gradients, and one unit's that are added or copied to the CPU.
    offloads = run.layout.offload != "none"
    gradients = 0 if offloads else sum(unit.owned_gradients for unit in units.all)
    largest_unit = (
        max(unit.owned_gradients for unit in (outside, block, expert)) if resolved.micro_batches > 1 or offloads else 0
    )
    return StreamBuffers(
        side_streams=gathered_bytes + copied_shard + state_bytes * (gradients + largest_unit),
        largest_sum=state_bytes * max(outside.reduced, block.reduced, expert.reduced),
    )

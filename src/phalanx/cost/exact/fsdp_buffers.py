"""Buffers in which ZeRO-3's units gather and reduce.

On a CPU they are those of `parallel.data.fsdp` on gloo, on CUDA those of PyTorch's FSDP2 on separate streams."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from phalanx.cost.exact.parameter_shapes import Shapes, max_shard_elements, num_elements
from phalanx.cost.exact.rank_tensors import RankTensors
from phalanx.cost.precision import COMPUTE_BYTES, STATE_BYTES, Precision
from phalanx.spec.layout import Layout
from phalanx.spec.run import RunSpec

FIRST_BLOCK = 1e-9
"""Fraction of the backward pass that is complete at the start of the first block, after the loss."""


@dataclass(frozen=True)
class CommBufferPeak:
    """Communication buffers at a time of a step's last micro-batch."""

    backward_fraction: float
    """Completed fraction of the backward pass: 0 at its start, 1 at its end and at the update."""
    bytes: int
    is_between_blocks: bool = False
    """True between blocks, when the inner gradients of a block have been freed."""
    gather_stream_bytes: int = 0
    """Part of `bytes` on the gather stream, whose memory CUDA's allocator keeps separate."""


def fsdp_buffer_peaks(rank: RankTensors, run: RunSpec, accumulation: int, has_replicas: bool) -> list[CommBufferPeak]:
    """Return the communication buffers at the times of a step's last micro-batch.

    Args:
        rank: Tensors of the rank. Experts can have data-parallel ranks of their own.
        run: The run.
        accumulation: Micro-batches per step.
        has_replicas: True if other ranks have a copy of the same shards (hsdp).
    """
    layout = run.layout
    precision = run.training.precision
    if layout.pp > 1:  # parameters stay gathered for the step
        layout = layout.model_copy(update={"reshard_after_forward": False})
    if run.cluster.uses_cuda:
        peaks = _cuda_peaks(rank, layout, precision, accumulates=accumulation > 1 and layout.pp == 1)
    else:
        deferred = not has_replicas
        summed_twice = deferred and accumulation > 1 and layout.offload == "none"
        peaks = _cpu_peaks(rank, layout, precision, summed_twice=summed_twice)
    return [replace(peak, backward_fraction=ceil(peak.backward_fraction)) for peak in peaks] if layout.pp > 1 else peaks


def _cpu_peaks(rank: RankTensors, layout: Layout, precision: Precision, summed_twice: bool) -> list[CommBufferPeak]:
    """Return the buffers on a CPU. With separate experts, one gradient is in transit at a time."""

    def unit_peaks(shapes: Shapes, ranks: int, num_full_buffers: int = 2) -> list[CommBufferPeak]:
        return _cpu_unit_peaks(
            shapes, layout, ranks, precision=precision, num_full_buffers=num_full_buffers, summed_twice=summed_twice
        )

    if not rank.expert:
        return unit_peaks(rank.dense, rank.shards)
    return _combine_peaks(
        unit_peaks(rank.dense, rank.shards, num_full_buffers=0), unit_peaks(rank.expert, rank.expert_shards)
    )


@dataclass(frozen=True)
class CudaUnits:
    """Elements of FSDP2's units on a rank: parameters of all ranks with padding, gradients without."""

    root: int
    """Parameters outside blocks."""
    block: int
    """Parameters of the largest block, without experts that have ranks of their own."""
    expert: int
    """Parameters of the largest unit of such experts, which are inside blocks; 0 without them."""
    num_blocks: int
    all_blocks: int
    """Parameters of all blocks together."""
    root_gradient: int
    head_gradient: int
    """Gradients of the root before the first block's backward pass: all except an untied embedding's."""
    unit_gradient: int
    """Gradients of the largest unit except the root."""

    def gathered_ahead(self, layout: Layout) -> int:
        """Return the elements that are prefetched while a block computes: a (block + expert).

        With experts it is one block less, because their own gather is the first. The number `a` is
        `layout.fsdp_prefetch`, or all other blocks if they stay gathered."""
        num_ahead = min(max(1, layout.fsdp_prefetch), self.num_blocks)
        if not layout.reshard_after_forward:
            num_ahead = max(num_ahead, self.num_blocks - 1)
        return num_ahead * (self.block + self.expert) - (self.block if self.expert else 0)


@dataclass(frozen=True)
class CudaBuffers:
    """Bytes of FSDP2's buffers on CUDA, by phase of a block's backward pass."""

    before: int
    """Gathered parameters at the start of the backward pass."""
    root: int
    """Root parameters and gradients of the head, during the full backward pass."""
    ahead: int
    """Prefetched parameters, on the gather stream; part of the phases below."""
    expert_copy: int
    """Buffer of experts on the gather stream, while it is copied out; part of `copied_out`."""
    copied_out: int
    """While a block computes: its parameters, and prefetched parameters."""
    gradients_ready: int
    """After a block: its gradients in addition to its parameters."""
    between: int
    """Between two blocks: prefetched parameters, and the reduction of the last completed unit."""
    block_sum: int
    """Reduction of the previous block, until the current block starts its own."""
    root_sum: int
    """Reduction of the root and its gradients, at the end."""
    earlier_root_sum: int
    """Root gradients of the previous micro-batch, until the first block is complete."""


def _cuda_units(rank: RankTensors, layout: Layout) -> CudaUnits:
    root, *blocks = (size * rank.shards for size in fsdp_unit_sizes(rank.dense, layout, rank.shards))
    root_gradient, *gradients = fsdp_unit_sizes(rank.dense, layout, 1)
    expert_gradients = fsdp_unit_sizes(rank.expert, layout, 1)
    late_names = [name for name in rank.dense if name.startswith(("embedding", "positions"))]
    late = sum(num_elements(rank.dense[name]) for name in late_names) if "head.weight" in rank.dense else 0
    return CudaUnits(
        root=root,
        block=max(blocks, default=0),
        expert=max(fsdp_unit_sizes(rank.expert, layout, rank.expert_shards)) * rank.expert_shards,
        num_blocks=len(blocks),
        all_blocks=sum(blocks),
        root_gradient=root_gradient,
        head_gradient=root_gradient - late,
        unit_gradient=max([*gradients, *expert_gradients]),
    )


def _cuda_buffers(
    rank: RankTensors, units: CudaUnits, layout: Layout, precision: Precision, accumulates: bool
) -> CudaBuffers:
    """Return the buffers of each phase, with c bytes per element in compute and s per element in a sum.

    copied_out      = c (block + ahead + expert) + c expert
    gradients_ready = c (block + ahead + expert) + c unit_gradient
    between         = c (block + ahead) + sum of experts, or without experts of the block
    sum of a unit   = s (unit + unit / ranks): sent gradients, and the received shard"""
    compute = COMPUTE_BYTES[precision]
    state = STATE_BYTES[precision]
    ahead = units.gathered_ahead(layout)
    gathered = units.block + ahead + units.expert
    block_sum = _sum_bytes(units.block, rank.shards, precision)
    last_sum = _sum_bytes(units.expert, rank.expert_shards, precision) if units.expert else block_sum
    return CudaBuffers(
        before=compute * (units.root + (0 if layout.reshard_after_forward else units.all_blocks)),
        root=compute * (units.root + units.head_gradient),
        ahead=compute * ahead,
        expert_copy=compute * units.expert,
        copied_out=compute * (gathered + units.expert),
        gradients_ready=compute * (gathered + units.unit_gradient),
        between=compute * (units.block + ahead) + last_sum,
        block_sum=block_sum,
        root_sum=compute * units.root_gradient + _sum_bytes(units.root, rank.shards, precision),
        earlier_root_sum=state * units.root if accumulates else 0,
    )


def _sum_bytes(elements: int, ranks: int, precision: Precision) -> int:
    """Return s (n + n / ranks): bytes of the gradients that a unit sends and of the received shard."""
    return STATE_BYTES[precision] * (elements + elements // ranks)


def _cuda_peaks(rank: RankTensors, layout: Layout, precision: Precision, accumulates: bool) -> list[CommBufferPeak]:
    """Return the buffers on CUDA (torch/distributed/fsdp/_fully_shard of PyTorch 2.11).

    A block's gathered buffer exists until the block computes, when it is copied out. The next block's buffer exists by
    then (`FSDPParamGroup.wait_for_unshard`, `pre_backward`). After a block, its parameters are freed, and its gradients
    are copied to the send buffer in the dtype of the sum (`post_backward`, `foreach_reduce`). That buffer exists until
    the next unit is at that point. The root's buffer exists from a micro-batch to the first block of the next one
    (`accumulates`; it is freed after the last only, `_root_post_backward_final_callback`). Experts with ranks of their
    own are units in blocks."""
    units = _cuda_units(rank, layout)
    buffers = _cuda_buffers(rank, units, layout, precision=precision, accumulates=accumulates)

    def computes(fraction: float, sums: int) -> CommBufferPeak:
        size = buffers.root + buffers.copied_out + sums
        return CommBufferPeak(fraction, size, False, gather_stream_bytes=buffers.ahead + buffers.expert_copy)

    def is_done(fraction: float, sums: int) -> CommBufferPeak:
        return CommBufferPeak(
            fraction, buffers.root + buffers.gradients_ready + sums, True, gather_stream_bytes=buffers.ahead
        )

    block = 1 / max(1, units.num_blocks)  # of the backward pass
    until_done = block / 2 if units.expert else block
    second_done = is_done(min(1.0, block + until_done), buffers.block_sum)
    end_bytes = max(second_done.bytes, buffers.root + buffers.between, buffers.root_sum)
    return [
        CommBufferPeak(0.0, buffers.before + buffers.earlier_root_sum),
        computes(FIRST_BLOCK, buffers.earlier_root_sum),
        is_done(until_done, buffers.earlier_root_sum),
        CommBufferPeak(block, buffers.root + buffers.between, True, gather_stream_bytes=buffers.ahead),
        computes(block, buffers.block_sum),
        second_done,
        computes(1 - block, buffers.block_sum),
        CommBufferPeak(1.0, end_bytes, True),
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

    The gather stream has the buffers of the root and the first block, or of the experts of two blocks, and a copied
    shard. The reduce stream has a step's gradients, and one unit's that are added to them or copied to CPU memory.

    Args:
        rank: Tensors of the rank.
        run: Run whose layout and precision apply.
        accumulation: Micro-batches per step.
    """
    layout = run.layout
    precision = run.training.precision
    owned, owned_experts = (
        fsdp_unit_sizes(shapes, layout, ranks)
        for shapes, ranks in ((rank.dense, rank.shards), (rank.expert, rank.expert_shards))
    )
    root, *blocks = owned
    block = max(blocks, default=0)
    expert = max(owned_experts)
    root_full = root * rank.shards
    block_full = block * rank.shards
    expert_full = expert * rank.expert_shards
    offloads = layout.offload != "none"
    summed = 0 if offloads else sum(owned) + sum(owned_experts)
    summed += max(root, block, expert) if accumulation > 1 or offloads else 0
    # Buffers of experts and of blocks alternate: half of one is lost between them.
    gathered = max(root_full, 2 * expert_full + expert_full // 2, block_full) + block_full + max(block, expert)
    return StreamBuffers(
        COMPUTE_BYTES[precision] * gathered + STATE_BYTES[precision] * summed,
        STATE_BYTES[precision] * max(root_full, block_full, expert_full),
    )


def _combine_peaks(peaks: list[CommBufferPeak], other_peaks: list[CommBufferPeak]) -> list[CommBufferPeak]:
    """Return the buffers of two kinds of tensors, each plus the peak of the other kind."""
    max_bytes, max_other_bytes = (max((peak.bytes for peak in group), default=0) for group in (peaks, other_peaks))
    combined = [replace(peak, bytes=peak.bytes + max_other_bytes) for peak in peaks]
    return combined + [replace(peak, bytes=peak.bytes + max_bytes) for peak in other_peaks]


def _cpu_unit_peaks(
    shapes: Shapes, layout: Layout, ranks: int, precision: Precision, num_full_buffers: int, summed_twice: bool
) -> list[CommBufferPeak]:
    """Return ZeRO-3's buffers at the start of backward, at each block's gradients, and at the end.

    The root unit contains all parameters outside blocks, and stays gathered. In addition to it, `prefetch` blocks and
    the current block are gathered (without `reshard` all). When a block's gradients are copied to the send buffer, that
    buffer replaces its parameters, and the previous block's gradients are in transit. Gradients are kept in the compute
    dtype, the head's all the time; they are sent and summed in the parameters' dtype. Without `num_full_buffers`, other
    tensors are in transit then. The copies that FSDP2 makes of gathered blocks are smaller
    (torch/distributed/fsdp/_fully_shard). With `summed_twice`, a micro-batch's sums exist in addition to those of
    previous ones (`parallel.data.fsdp`)."""
    compute_bytes = COMPUTE_BYTES[precision] * ranks
    state_bytes = STATE_BYTES[precision] * ranks
    root, *blocks = fsdp_unit_sizes(shapes, layout, ranks)
    block = max(blocks, default=0)
    num_ahead = min(max(1, layout.fsdp_prefetch), len(blocks))
    last_names = [] if "head.weight" not in shapes else [n for n in shapes if n.startswith(("embedding", "positions"))]
    early_root = root - sum(max_shard_elements(shapes[name], ranks) for name in last_names)

    def reduce_bytes(unit: int) -> int:
        return state_bytes * unit * num_full_buffers + (STATE_BYTES[precision] * unit if num_full_buffers else 0)

    gathered_elements = root + (num_ahead * block if layout.reshard_after_forward else sum(blocks))
    block_bytes = compute_bytes * (gathered_elements + early_root + block) + reduce_bytes(block)
    copy_bytes = block_bytes + state_bytes * block
    end_bytes = max((compute_bytes + state_bytes) * root + reduce_bytes(block), reduce_bytes(root))
    sum_bytes = STATE_BYTES[precision] * (root + sum(blocks)) if summed_twice else 0
    first_fraction = 1 / max(1, len(blocks))
    inside_points = (0.0, compute_bytes * gathered_elements), (first_fraction, block_bytes), (1.0, block_bytes)
    # When the first block's gradients are copied, nothing is in transit yet.
    between_points = (
        (first_fraction, block_bytes),
        (min(1.0, 2 * first_fraction), copy_bytes),
        (1.0, max(copy_bytes, end_bytes)),
    )
    points = [*((*point, False) for point in inside_points), *((*point, True) for point in between_points)]
    return [
        CommBufferPeak(fraction, round(size + sum_bytes * fraction), is_between)
        for fraction, size, is_between in points
    ]


def fsdp_unit_sizes(shapes: Shapes, layout: Layout, ranks: int) -> list[int]:
    """Return the elements that a rank owns, with padding, of each unit: the root, then every wrapped part.

    Args:
        shapes: Parameters of the rank.
        layout: Layout of the run.
        ranks: Ranks that share the parameters.
    """
    owned = {"": 0}
    for name, shape in shapes.items():
        unit = fsdp_unit_of(name, layout)
        owned[unit] = owned.get(unit, 0) + max_shard_elements(shape, ranks)
    return list(owned.values())


def fsdp_unit_of(name: str, layout: Layout) -> str:
    """Return the name of the FSDP unit that a parameter belongs to; "" for the root."""
    # "blocks.0.attention.wq.weight": a block is the first two names, a sublayer three. Recomputed blocks stay one unit.
    depth = {"model": 0, "block": 2, "sublayer": 2 if layout.activation_checkpointing == "full" else 3}[
        layout.fsdp_unit
    ]
    return ".".join(name.split(".")[:depth]) if name.startswith("blocks.") else ""

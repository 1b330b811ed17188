"""Buffers in which ZeRO-3's units gather and reduce.

On a CPU they are those of `parallel.data.fsdp` on gloo, on CUDA those of PyTorch's FSDP2 (`fsdp_cuda_buffers`)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from phalanx.cost.exact.comm_buffer_peak import FIRST_BLOCK, CommBufferPeak
from phalanx.cost.exact.fsdp_cuda_buffers import cuda_buffer_peaks
from phalanx.cost.exact.fsdp_units import fsdp_unit_sizes
from phalanx.cost.exact.parameter_shapes import Shapes, max_shard_elements
from phalanx.cost.exact.rank_tensors import RankTensors
from phalanx.cost.precision import COMPUTE_BYTES, STATE_BYTES
from phalanx.spec.layout import EMBEDDINGS, Layout
from phalanx.spec.precision import Precision
from phalanx.spec.run import RunSpec


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
        peaks = cuda_buffer_peaks(rank, layout, precision, accumulates=accumulation > 1 and layout.pp == 1)
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


def _combine_peaks(peaks: list[CommBufferPeak], other_peaks: list[CommBufferPeak]) -> list[CommBufferPeak]:
    """Return the buffers of two kinds of tensors, each plus the peak of the other kind."""
    max_bytes, max_other_bytes = (max((peak.bytes for peak in group), default=0) for group in (peaks, other_peaks))
    combined = [replace(peak, bytes=peak.bytes + max_other_bytes) for peak in peaks]
    return combined + [replace(peak, bytes=peak.bytes + max_bytes) for peak in other_peaks]


@dataclass(frozen=True, kw_only=True)
class _CpuUnits:
    """Elements that a rank owns, with padding, of the units of one kind of tensors."""

    root: int
    """Elements outside blocks of a root that owns them; 0 if they are two units."""
    root_head_gradient: int
    """Gradients of the root before the first block's backward pass: all except an untied embedding's."""
    embedding: int
    head: int
    """Elements of the unit of the final norm and head; 0 without it."""
    block: int
    """Elements of the largest block."""
    num_blocks: int
    all_blocks: int
    """Elements of all blocks together."""
    last_reduced: int
    """Elements of the unit whose gradients are the last: the root, or the embedding."""
    total: int
    """Elements of all units."""

    def gathered(self, layout: Layout) -> int:
        """Return the gathered elements, except the head's unit, during the backward pass.

        They are the root and the prefetched blocks, or without resharding all blocks and the embedding."""
        num_ahead = min(max(1, layout.fsdp_prefetch), self.num_blocks)
        return self.root + (
            num_ahead * self.block if layout.reshard_after_forward else self.all_blocks + self.embedding
        )


def _cpu_units(shapes: Shapes, layout: Layout, ranks: int) -> _CpuUnits:
    sizes = fsdp_unit_sizes(shapes, layout, ranks)
    has_untied_head = "head.weight" in shapes
    late_names = [name for name in shapes if has_untied_head and name.startswith(EMBEDDINGS)]
    late = sum(max_shard_elements(shapes[name], ranks) for name in late_names)
    return _CpuUnits(
        root=sizes.root,
        root_head_gradient=max(0, sizes.root - late),
        embedding=sizes.embedding,
        head=sizes.head,
        block=max(sizes.blocks, default=0),
        num_blocks=len(sizes.blocks),
        all_blocks=sum(sizes.blocks),
        last_reduced=sizes.last_reduced,
        total=sizes.total,
    )


def _cpu_unit_peaks(
    shapes: Shapes, layout: Layout, ranks: int, precision: Precision, num_full_buffers: int, summed_twice: bool
) -> list[CommBufferPeak]:
    """Return ZeRO-3's buffers at the start of backward, at each block's gradients, and at the end.

    The head's unit is gathered until its gradients are copied to the send buffer. They are in transit during the first
    block's backward pass. A root that has all parameters outside blocks stays gathered instead. In addition, `prefetch`
    blocks and the current block are gathered (without `reshard` all). When a block's gradients are copied to the send
    buffer, that buffer replaces its parameters, and the previous block's gradients are in transit. Gradients are kept
    in the compute dtype, those of a root's head all the time; they are sent and summed in the parameters' dtype.
    Without `num_full_buffers`, other tensors are in transit then. The copies that FSDP2 makes of gathered blocks are
    smaller (torch/distributed/fsdp/_fully_shard). With `summed_twice`, a micro-batch's sums exist in addition to those
    of previous ones (`parallel.data.fsdp`)."""
    compute_bytes = COMPUTE_BYTES[precision] * ranks
    state_bytes = STATE_BYTES[precision] * ranks
    units = _cpu_units(shapes, layout, ranks)
    sum_bytes = STATE_BYTES[precision] * units.total if summed_twice else 0

    def reduce_bytes(unit: int) -> int:
        return state_bytes * unit * num_full_buffers + (STATE_BYTES[precision] * unit if num_full_buffers else 0)

    def peak(fraction: float, size: int, is_between_blocks: bool) -> CommBufferPeak:
        total = round(size + sum_bytes * fraction)
        return CommBufferPeak(backward_fraction=fraction, bytes=total, is_between_blocks=is_between_blocks)

    gathered_bytes = compute_bytes * units.gathered(layout)
    computing_bytes = gathered_bytes + compute_bytes * (units.root_head_gradient + units.block)
    block_bytes = computing_bytes + reduce_bytes(units.block)
    copy_bytes = block_bytes + state_bytes * units.block
    end_bytes = max(
        (compute_bytes + state_bytes) * units.last_reduced + reduce_bytes(units.block), reduce_bytes(units.last_reduced)
    )
    block_fraction = 1 / max(1, units.num_blocks)
    first_block_bytes = computing_bytes + reduce_bytes(units.head)
    head_peaks = [
        peak(FIRST_BLOCK, gathered_bytes + (compute_bytes + state_bytes) * units.head, is_between_blocks=True),
        peak(FIRST_BLOCK, first_block_bytes, is_between_blocks=False),
        peak(block_fraction, first_block_bytes + state_bytes * units.block, is_between_blocks=True),
    ]
    return [
        peak(0.0, gathered_bytes + compute_bytes * units.head, is_between_blocks=False),
        *(head_peaks if units.head else []),
        peak(block_fraction, block_bytes, is_between_blocks=False),
        peak(1.0, block_bytes, is_between_blocks=False),
        # When the first block's gradients are copied, no other block's are in transit yet.
        peak(block_fraction, block_bytes, is_between_blocks=True),
        peak(min(1.0, 2 * block_fraction), copy_bytes, is_between_blocks=True),
        peak(1.0, max(copy_bytes, end_bytes), is_between_blocks=True),
    ]

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
        peaks = _cpu_peaks(rank, layout, precision, summed_twice=summed_twice, deferred=deferred)
    return [replace(peak, backward_fraction=ceil(peak.backward_fraction)) for peak in peaks] if layout.pp > 1 else peaks


def _cpu_peaks(
    rank: RankTensors, layout: Layout, precision: Precision, summed_twice: bool, deferred: bool
) -> list[CommBufferPeak]:
    """Return the buffers on a CPU. With separate experts, one gradient is in transit at a time."""

    def unit_peaks(shapes: Shapes, ranks: int, num_full_buffers: int = 2) -> list[CommBufferPeak]:
        return _cpu_unit_peaks(
            shapes,
            layout,
            ranks,
            precision=precision,
            num_full_buffers=num_full_buffers,
            summed_twice=summed_twice,
            deferred=deferred,
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

    def gathered(self, layout: Layout, num_started: int = 0) -> int:
        """Return the gathered elements, except the head's unit and the current block, during the backward pass.

        They are the root and the prefetched blocks, or without resharding all blocks and the embedding.

        Args:
            layout: Layout of the run.
            num_started: Number of blocks whose backward pass has started, after which fewer may be left to prefetch.
        """
        num_ahead = min(max(1, layout.fsdp_prefetch), self.num_blocks - num_started)
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
    shapes: Shapes,
    layout: Layout,
    ranks: int,
    precision: Precision,
    num_full_buffers: int,
    summed_twice: bool,
    deferred: bool,
) -> list[CommBufferPeak]:
    """Return ZeRO-3's buffers at the start of backward, at each block's gradients, and at the end.

    The head's unit is gathered until its gradients are copied to the send buffer. They are in transit during the first
    block's backward pass. A root that has all parameters outside blocks stays gathered instead. In addition, `prefetch`
    blocks and the current block are gathered (without `reshard` all). When a block's gradients are copied to the send
    buffer, that buffer replaces its parameters, and the previous block's gradients are in transit. Gradients are kept
    in the compute dtype, those of a root's head all the time; they are sent and summed in the parameters' dtype.
    Without `num_full_buffers`, other tensors are in transit then. The copies that FSDP2 makes of gathered blocks are
    smaller (torch/distributed/fsdp/_fully_shard). With `summed_twice`, a micro-batch's sums exist in addition to those
    of previous ones (`parallel.data.fsdp`). Exchanges that are not `deferred` (with replicas) end before the backward
    pass of the next block."""
    compute_bytes = COMPUTE_BYTES[precision] * ranks
    state_bytes = STATE_BYTES[precision] * ranks
    units = _cpu_units(shapes, layout, ranks)
    row_bytes = STATE_BYTES[precision]

    def reduce_bytes(unit: int) -> int:
        return (state_bytes * num_full_buffers + row_bytes) * unit if num_full_buffers else 0

    def peak(fraction: float, size: int, is_between_blocks: bool, summed: int = 0) -> CommBufferPeak:
        """Return a peak of `size` bytes, when the gradients of `summed` elements have been summed."""
        return CommBufferPeak(
            backward_fraction=fraction,
            gradient_fraction=summed / max(1, units.total),
            bytes=size + (row_bytes * summed if summed_twice else 0),
            is_between_blocks=is_between_blocks,
        )

    def block_peak(number: int, size: int, is_between_blocks: bool) -> CommBufferPeak:
        """Return a peak in or after the backward pass of a block, with `size` bytes and what is gathered then.

        Sums of the block before are a part of its exchange."""
        number = min(max(1, number), max(1, units.num_blocks))
        computing = units.gathered(layout, number) + units.root_head_gradient + units.block
        num_completed = number if is_between_blocks else number - 1
        return peak(
            max(FIRST_BLOCK, num_completed / max(1, units.num_blocks)),
            compute_bytes * computing + size,
            is_between_blocks=is_between_blocks,
            summed=units.head + (number - 2) * units.block if number > 1 else 0,
        )

    gathered_bytes = compute_bytes * units.gathered(layout)
    sent_bytes = reduce_bytes(units.block)
    end_bytes = max(
        (compute_bytes + state_bytes) * units.last_reduced + reduce_bytes(units.block), reduce_bytes(units.last_reduced)
    )
    late_blocks = sorted({2, units.num_blocks - 1, units.num_blocks} - {0, 1}) if units.num_blocks > 1 else []
    summed = units.total - (0 if units.root else units.last_reduced)
    if not deferred:
        exchanged_bytes = sent_bytes - compute_bytes * units.block  # gradients have been copied and freed
        head_bytes = compute_bytes * units.head + reduce_bytes(units.head)
        return [
            peak(0.0, gathered_bytes + compute_bytes * units.head, is_between_blocks=False),
            peak(FIRST_BLOCK, gathered_bytes + head_bytes, is_between_blocks=True),
            # FSDP2 keeps the buffer that a unit has sent until the next unit sends.
            block_peak(1, (state_bytes + row_bytes) * units.head, is_between_blocks=False),
            *(
                block_peak(number, (state_bytes + row_bytes) * units.block, is_between_blocks=False)
                for number in late_blocks
            ),
            *(block_peak(number, exchanged_bytes, is_between_blocks=True) for number in [1, *late_blocks]),
            peak(1.0, reduce_bytes(units.last_reduced), is_between_blocks=True, summed=summed),
        ]
    # FSDP2 keeps what the previous micro-batch has sent last until the first unit sends.
    kept_bytes = state_bytes * units.last_reduced if summed_twice else 0
    return [
        peak(0.0, gathered_bytes + compute_bytes * units.head + kept_bytes, is_between_blocks=False),
        peak(FIRST_BLOCK, gathered_bytes + (compute_bytes + state_bytes) * units.head, is_between_blocks=True),
        # The head's gradients are in transit during the first block's backward pass, until its gradients are copied.
        block_peak(1, reduce_bytes(units.head) if units.head else kept_bytes, is_between_blocks=False),
        block_peak(1, reduce_bytes(units.head) + state_bytes * units.block, is_between_blocks=True),
        block_peak(1, sent_bytes, is_between_blocks=True),
        *(block_peak(number, sent_bytes, is_between_blocks=False) for number in late_blocks),
        *(block_peak(number, sent_bytes + state_bytes * units.block, is_between_blocks=True) for number in late_blocks),
        peak(1.0, end_bytes, is_between_blocks=True, summed=summed),
    ]

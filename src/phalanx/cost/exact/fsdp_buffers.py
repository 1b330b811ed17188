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
        buffers = _CpuUnitBuffers(
            units=_cpu_units(shapes, layout, ranks),
            layout=layout,
            compute_bytes=COMPUTE_BYTES[precision] * ranks,
            state_bytes=STATE_BYTES[precision] * ranks,
            row_bytes=STATE_BYTES[precision],
            num_full_buffers=num_full_buffers,
            summed_twice=summed_twice,
        )
        return buffers.deferred_peaks() if deferred else buffers.immediate_peaks()

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


@dataclass(frozen=True, kw_only=True)
class _CpuUnitBuffers:
    """Buffers of the units of one kind of tensors on a CPU, at the start of backward, at each block, and at the end.

    A root that has all parameters outside blocks stays gathered; else the head's unit is gathered until its gradients
    are copied to the send buffer. `prefetch` blocks and the current block are gathered (without `reshard` all).
    Gradients are kept in the compute dtype, those of a root's head all the time; they are sent and summed in the
    parameters' dtype. The copies that FSDP2 makes of gathered blocks are smaller (torch/distributed/fsdp/_fully_shard).
    """

    units: _CpuUnits
    layout: Layout
    compute_bytes: int
    """Bytes of an owned element on all ranks together, when it is gathered."""
    state_bytes: int
    """Bytes of an owned element on all ranks together, in the dtype of the parameters."""
    row_bytes: int
    """Bytes of an owned element."""
    num_full_buffers: int
    """Full buffers of an exchange; without any, other tensors are in transit then."""
    summed_twice: bool
    """True if a micro-batch's sums exist in addition to those of previous ones (`parallel.data.fsdp`)."""

    def deferred_peaks(self) -> list[CommBufferPeak]:
        """Return the buffers where a unit's exchange ends when the gradients of the next unit are sent.

        When a block's gradients are copied to the send buffer, that buffer replaces its parameters, and the previous
        block's gradients are in transit. FSDP2 keeps what the previous micro-batch has sent last until the first unit
        sends."""
        units = self.units
        sent_bytes = self._exchange_bytes(units.block)
        head_bytes = self._exchange_bytes(units.head)
        kept_bytes = self.state_bytes * units.last_reduced if self.summed_twice else 0
        end_bytes = (self.compute_bytes + self.state_bytes) * units.last_reduced + sent_bytes
        return [
            self._start_peak(kept_bytes),
            self._head_peak((self.compute_bytes + self.state_bytes) * units.head),
            # The head's gradients are in transit until those of the first block are copied.
            self._peak_in_block(1, head_bytes if units.head else kept_bytes),
            self._peak_after_block(1, max(head_bytes + self.state_bytes * units.block, sent_bytes)),
            *(self._peak_in_block(number, sent_bytes) for number in self._late_blocks),
            *(
                self._peak_after_block(number, sent_bytes + self.state_bytes * units.block)
                for number in self._late_blocks
            ),
            self._end_peak(max(end_bytes, self._exchange_bytes(units.last_reduced))),
        ]

    def immediate_peaks(self) -> list[CommBufferPeak]:
        """Return the buffers where a unit's exchange ends before the backward pass of the next unit, with replicas.

        FSDP2 keeps the buffer that a unit has sent until the next unit sends."""
        units = self.units
        kept_bytes = self.state_bytes + self.row_bytes
        # By then the gradients have been copied and freed.
        exchanged_bytes = self._exchange_bytes(units.block) - self.compute_bytes * units.block
        return [
            self._start_peak(0),
            self._head_peak(self.compute_bytes * units.head + self._exchange_bytes(units.head)),
            self._peak_in_block(1, kept_bytes * units.head),
            *(self._peak_in_block(number, kept_bytes * units.block) for number in self._late_blocks),
            *(self._peak_after_block(number, exchanged_bytes) for number in [1, *self._late_blocks]),
            self._end_peak(self._exchange_bytes(units.last_reduced)),
        ]

    @property
    def _late_blocks(self) -> list[int]:
        """Numbers of the second block in the backward pass, and of the last two."""
        count = self.units.num_blocks
        return sorted({2, count - 1, count} - {0, 1}) if count > 1 else []

    def _exchange_bytes(self, unit: int) -> int:
        if not self.num_full_buffers:
            return 0
        return (self.state_bytes * self.num_full_buffers + self.row_bytes) * unit

    def _peak(self, fraction: float, size: int, is_between_blocks: bool, summed: int = 0) -> CommBufferPeak:
        """Return a peak of `size` bytes, when the gradients of `summed` elements have been summed."""
        return CommBufferPeak(
            backward_fraction=fraction,
            gradient_fraction=summed / max(1, self.units.total),
            bytes=size + (self.row_bytes * summed if self.summed_twice else 0),
            is_between_blocks=is_between_blocks,
        )

    def _start_peak(self, size: int) -> CommBufferPeak:
        gathered_bytes = self.compute_bytes * (self.units.gathered(self.layout) + self.units.head)
        return self._peak(0.0, gathered_bytes + size, is_between_blocks=False)

    def _head_peak(self, size: int) -> CommBufferPeak:
        gathered_bytes = self.compute_bytes * self.units.gathered(self.layout)
        return self._peak(FIRST_BLOCK, gathered_bytes + size, is_between_blocks=True)

    def _peak_in_block(self, number: int, size: int) -> CommBufferPeak:
        return self._block_peak(number, size, num_completed=number - 1)

    def _peak_after_block(self, number: int, size: int) -> CommBufferPeak:
        return self._block_peak(number, size, num_completed=number)

    def _block_peak(self, number: int, size: int, num_completed: int) -> CommBufferPeak:
        """Return a peak in or after a block, with `size` bytes and what is gathered then.

        Sums of the block before are a part of its exchange."""
        units = self.units
        computing = units.gathered(self.layout, number) + units.root_head_gradient + units.block
        return self._peak(
            max(FIRST_BLOCK, num_completed / max(1, units.num_blocks)),
            self.compute_bytes * computing + size,
            is_between_blocks=num_completed == number,
            summed=units.head + (number - 2) * units.block if number > 1 else 0,
        )

    def _end_peak(self, size: int) -> CommBufferPeak:
        summed = self.units.total - (0 if self.units.root else self.units.last_reduced)
        return self._peak(1.0, size, is_between_blocks=True, summed=summed)

"""Buffers in which ZeRO-3's units gather and reduce.

On a CPU they are those of `parallel.data.fsdp` on gloo, on CUDA those of PyTorch's FSDP2 (`fsdp_cuda_buffers`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from phalanx.cost.exact.comm_buffer_peak import CommBufferPeak, Moment
from phalanx.cost.exact.fsdp_cuda_buffers import cuda_buffer_peaks
from phalanx.cost.precision import COMPUTE_BYTES, STATE_BYTES
from phalanx.program.fsdp_units import (
    EMBEDDING,
    HEAD,
    ROOT,
    FsdpUnit,
    backward_order,
    backward_prefetches,
    fsdp_units,
    late_parameters,
)
from phalanx.program.rank_tensors import RankTensors
from phalanx.spec.layout import Layout
from phalanx.spec.parameter_shapes import num_elements
from phalanx.spec.precision import Precision
from phalanx.spec.resolved_run import ResolvedRun


def fsdp_buffer_peaks(resolved: ResolvedRun, rank: RankTensors) -> list[CommBufferPeak]:
    """Return the communication buffers at the times of a step's last micro-batch."""
    layout = resolved.layout
    precision = resolved.run.training.precision
    accumulates = resolved.micro_batches > 1
    if resolved.run.cluster.uses_cuda:
        if layout.pp == 1:
            return cuda_buffer_peaks(rank, layout, precision, accumulates=accumulates)
        kept = layout.model_copy(update={"reshard_after_forward": False})  # parameters stay gathered for the step
        return cuda_buffer_peaks(rank, kept, precision, accumulates=False)
    units = fsdp_units(rank, layout)
    if layout.pp > 1:
        return _pipeline_peaks(units, precision)
    is_deferred = resolved.data_dims.dp_replicate == 1
    backward = _CpuBackwardPass(units, layout, precision, accumulates=accumulates, is_deferred=is_deferred)
    return list(backward.peaks())


def _num_buffers(unit: FsdpUnit) -> int:
    """Return the number of buffers of an exchange: what is sent and what is received, or a copy on a single rank."""
    return 2 if unit.ranks > 1 else 1


def _pipeline_peaks(units: list[FsdpUnit], precision: Precision) -> list[CommBufferPeak]:
    """Return the buffers of a pipeline: parameters stay gathered for the step, at whose end unit after unit is sent.

    The full gradients of the micro-batches, which are part of the persistent memory, are freed unit after unit."""
    state_bytes = STATE_BYTES[precision]
    gathered_bytes = sum(unit.gathered_bytes(COMPUTE_BYTES[precision]) for unit in units)
    peaks = [CommBufferPeak(backward_fraction=0.0, bytes=gathered_bytes, moment="backward_start")]
    # Elements of the sums so far, minus those of the gradients that were freed.
    summed = 0
    for unit in units:
        gathered_bytes -= unit.gathered_bytes(COMPUTE_BYTES[precision])
        summed += unit.owned_gradients - unit.gradients
        exchanged = _num_buffers(unit) * unit.reduced + unit.last_gradients
        size = gathered_bytes + state_bytes * (exchanged + summed)
        peaks.append(CommBufferPeak(backward_fraction=1.0, bytes=size, moment="after_block"))
    return peaks


class _CpuBackwardPass:
    """The backward pass of a micro-batch: which units are gathered, and which exchange is under way.

    A unit gathers its parameters before its backward pass, and prefetches those of the next units. Afterwards it frees
    them and sends its gradients. Gradients have the compute dtype, and are sent and summed in the parameters' dtype.
    """

    def __init__(
        self, units: list[FsdpUnit], layout: Layout, precision: Precision, accumulates: bool, is_deferred: bool
    ) -> None:
        """Create the pass at its start, after the loss.

        Args:
            units: Units in the order of the forward pass.
            accumulates: True if a step has several micro-batches.
            is_deferred: True if an exchange ends when the next unit sends. Else it ends at once, but what was sent is
                kept until then.
        """
        self.units = [unit for unit in reversed(units) if unit.has_backward]
        """Units in the order in which their backward passes end."""
        has_root = units[0].name == ROOT
        starts = backward_order([unit for unit in units if unit.has_backward], has_root=has_root)
        prefetches = backward_prefetches(starts, layout.fsdp_prefetch)
        self.ahead = {unit.name: ahead for unit, ahead in zip(starts, prefetches, strict=True)}
        """Units that each unit gathers ahead."""
        self.first = starts[0]
        self.by_name = {unit.name: unit for unit in units}
        self.layout = layout
        self.compute_bytes = COMPUTE_BYTES[precision]
        self.state_bytes = STATE_BYTES[precision]
        self.is_deferred = is_deferred
        self.keeps_sums_apart = is_deferred and accumulates and layout.offload == "none"
        """True if a micro-batch's sums exist in addition to those of previous ones (`parallel.data.fsdp`)."""
        stays_gathered = not layout.reshard_after_forward
        self.gathered = {unit.name: unit for unit in units if unit.name in (ROOT, HEAD) or stays_gathered}
        self.root_gradients = 0
        """Bytes of the gradients that a root keeps until all of them exist."""
        # FSDP2 keeps what the previous micro-batch has sent last until the first unit sends.
        self.in_transit = self.state_bytes * units[0].reduced if accumulates else 0
        """Bytes that the unit before has sent, and receives."""
        self.pending_sum = 0
        """Bytes of the sum of an exchange that has not ended."""
        self.sums = 0
        """Bytes of the sums of this micro-batch, except a pending one."""
        self.all_sums = self.state_bytes * sum(unit.owned_gradients for unit in units)
        self.num_blocks = sum(unit.is_in_blocks and not unit.is_inner and unit.has_backward for unit in units)
        self.num_completed = 0
        """Number of blocks whose backward pass has ended."""
        self.backward_fraction = 0.0
        """Completed fraction of the blocks' backward pass (`CommBufferPeak`)."""

    def peaks(self) -> Iterator[CommBufferPeak]:
        """Yield the buffers at the start, when a unit is gathered, inside it, when it ends, and when it sends."""
        yield from self._run_loss_and_head()
        started = set[str]()
        for unit in self.units:
            for name in (unit.parent, unit.name):  # a block starts before its experts
                if name is not None and name.startswith("blocks.") and name not in started:
                    started.add(name)
                    yield from self._gather(self.by_name[name])
                    yield from self._run(self.by_name[name])
            yield from self._end(unit)
            yield from self._send(unit)

    def _run_loss_and_head(self) -> Iterator[CommBufferPeak]:
        """Yield the buffers in the loss and in the head, and in the blocks of a root that is the only unit.

        The gradients of a trained unit take more than the copy out of the buffer of its gather in the forward pass."""
        sizes = [
            (unit.gathered_bytes(self.compute_bytes), self.compute_bytes * unit.reduced)
            for unit in self.gathered.values()
            if unit.ranks > 1
        ]
        yield self._peak("after_block", max((gathered for gathered, sent in sizes if 2 * sent < gathered), default=0))
        yield self._peak("in_loss")
        self._prefetch(self.first)
        yield self._peak("in_head")
        root = self.units[-1]
        if root.name == ROOT:
            self.root_gradients = self.compute_bytes * _early_gradients(root)
            if not self.num_blocks:
                yield from self._run_blocks_of_root(root)

    def _run_blocks_of_root(self, root: FsdpUnit) -> Iterator[CommBufferPeak]:
        elements = Counter[str]()
        for name, shape in root.trained.items():
            if name.startswith("blocks."):
                elements[".".join(name.split(".")[:2])] += num_elements(shape)
        self.num_blocks = len(elements)
        for count in reversed(elements.values()):
            yield self._peak_inside("inside_block")
            self.root_gradients += self.compute_bytes * count
            self._complete_block()

    def _gather(self, unit: FsdpUnit) -> Iterator[CommBufferPeak]:
        """Gather a unit before its backward pass, and then the next ones."""
        if self.layout.reshard_after_forward:
            self.gathered[unit.name] = unit
            copied_bytes = unit.gathered_bytes(self.compute_bytes) if unit.ranks > 1 else 0
            copied_bytes += unit.stack_bytes(self.compute_bytes)
            yield self._peak("after_block", copied_bytes)  # out of the buffer of the gather
        self._prefetch(unit)

    def _prefetch(self, unit: FsdpUnit) -> None:
        """Gather the units ahead of this one, except the embedding, whose backward pass needs no parameters."""
        ahead = [other for other in self.ahead[unit.name] if other.name != EMBEDDING]
        self.gathered |= {other.name: other for other in ahead if other.ranks > 1}  # a single rank has all parameters

    def _run(self, unit: FsdpUnit) -> Iterator[CommBufferPeak]:
        """Yield the buffers inside a unit. Its experts, if they are another unit, run before the rest of it."""
        if not self._has_experts(unit):
            yield self._peak_inside("inside_block" if unit.parent is None else "inside_mlp")

    def _end(self, unit: FsdpUnit) -> Iterator[CommBufferPeak]:
        """Yield the buffers when all gradients of a unit exist."""
        if unit.is_in_blocks and not unit.is_inner:
            if self._has_experts(unit):
                yield self._peak_inside("inside_attention")
            self._complete_block()
        if unit.name == ROOT:
            self.root_gradients = 0
        if unit is self.units[-1]:
            self.backward_fraction = 1.0
        yield self._peak(self._moment_after(unit), self.compute_bytes * unit.gradients)

    def _send(self, unit: FsdpUnit) -> Iterator[CommBufferPeak]:
        """Free the parameters of a unit, and send its gradients, which ends the exchange before."""
        self.gathered.pop(unit.name, None)
        if not unit.trained:
            return
        moment = self._moment_after(unit)
        if unit.trained_stacks:  # they are copied one after the other
            yield self._peak(moment, self.compute_bytes * (unit.gradients + max(unit.trained_stacks)))
        self.sums += self.pending_sum
        self.pending_sum = self.state_bytes * unit.owned_gradients
        self.in_transit = _num_buffers(unit) * self.state_bytes * unit.reduced
        yield self._peak(moment, self.compute_bytes * unit.last_gradients)
        if moment == "after_experts":
            yield self._peak("in_dispatch")
        if not self.is_deferred or unit.ranks == 1:
            self.sums += self.pending_sum
            self.pending_sum = 0
            self.in_transit = self.state_bytes * unit.reduced

    def _complete_block(self) -> None:
        self.num_completed += 1
        self.backward_fraction = self.num_completed / self.num_blocks

    def _has_experts(self, unit: FsdpUnit) -> bool:
        """Return whether another unit is inside this one."""
        return any(other.parent == unit.name for other in self.units)

    def _moment_after(self, unit: FsdpUnit) -> Moment:
        return "after_experts" if unit.is_inner else "after_block"

    def _peak_inside(self, moment: Moment) -> CommBufferPeak:
        """Return the peak inside a block, where each weight may have a gradient in addition to the buffers."""
        return replace(self._peak(moment), weight_gradient_bytes=self.compute_bytes)

    def _peak(self, moment: Moment, size: int = 0) -> CommBufferPeak:
        """Return a peak with `size` bytes in addition to gathered parameters, exchanges and a root's gradients."""
        gathered_bytes = sum(unit.gathered_bytes(self.compute_bytes) for unit in self.gathered.values())
        sums_bytes = self.sums if self.keeps_sums_apart else 0
        return CommBufferPeak(
            backward_fraction=self.backward_fraction,
            gradient_fraction=self.sums / self.all_sums,
            bytes=gathered_bytes + self.in_transit + self.pending_sum + self.root_gradients + sums_bytes + size,
            moment=moment,
        )


def _early_gradients(root: FsdpUnit) -> int:
    """Return the elements of a root whose gradients precede all blocks: those of its norm and head."""
    late = late_parameters(root)
    shapes = ((name, shape) for name, shape in root.trained.items() if not name.startswith("blocks."))
    return sum(num_elements(shape) for name, shape in shapes if name not in late)

"""Buffers in which ZeRO-3's units gather and reduce: on a CPU as `parallel.data.fsdp` has it on gloo, on CUDA as
PyTorch's FSDP2 has it on streams of its own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from phalanx.cost.exact.parameter_shapes import Shapes, max_shard_elements, num_elements
from phalanx.cost.exact.rank_tensors import RankTensors
from phalanx.cost.precision import COMPUTE_BYTES, STATE_BYTES, Precision
from phalanx.spec.layout import Layout
from phalanx.spec.run import RunSpec

FIRST_BLOCK = 1e-9
"""Share of the backward pass that is done when it comes to the first block, after the loss."""


@dataclass(frozen=True)
class CommBufferPeak:
    """Buffers at a moment of a step's last micro-batch."""

    backward_fraction: float
    """Share of its backward pass, from 0 when that begins to 1 at its end and at the update."""
    bytes: int
    is_between_blocks: bool = False
    """Whether it is between blocks, whose inner gradients are gone."""
    gather_stream_bytes: int = 0
    """Of these, on the stream that gathers, whose memory CUDA's allocator keeps apart."""


def fsdp_buffer_peaks(rank: RankTensors, run: RunSpec, accumulation: int, has_replicas: bool) -> list[CommBufferPeak]:
    """Return the moments of a step's last micro-batch; of a rank's tensors, experts may have ranks of their own.

    Args:
        accumulation: Micro-batches of a step.
        has_replicas: Whether other ranks have a copy of the same shards (hsdp).
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
    """Where experts have ranks of their own, one gradient is on its way at a time."""

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
    """Elements of the units that FSDP2 gathers and sums on a rank: parameters of all ranks with their padding, and
    gradients without."""

    root: int
    """Parameters that are in no block."""
    block: int
    """Parameters of the largest block, without experts that have ranks of their own."""
    expert: int
    """Parameters of the largest unit of such experts, which are inside blocks; 0 if there are none."""
    num_blocks: int
    all_blocks: int
    """Parameters of all blocks together."""
    root_gradient: int
    head_gradient: int
    """The root's gradients that exist before the first block's backward pass: all but those of an untied embedding."""
    unit_gradient: int
    """Gradients of the largest unit but the root."""

    def gathered_ahead(self, layout: Layout) -> int:
        """Return the elements that are gathered while a block computes: a (block + expert), one block less if it has
        experts, whose own gather is the first of these.

        The number `a` is `layout.fsdp_prefetch`, or all other blocks if they stay gathered.
        """
        num_ahead = min(max(1, layout.fsdp_prefetch), self.num_blocks)
        if not layout.reshard_after_forward:
            num_ahead = max(num_ahead, self.num_blocks - 1)
        return num_ahead * (self.block + self.expert) - (self.block if self.expert else 0)


@dataclass(frozen=True)
class CudaBuffers:
    """Bytes of the buffers of FSDP2 on CUDA, by the stage of a block's backward pass that they belong to."""

    before: int
    """Gathered parameters when the backward pass starts."""
    root: int
    """Root parameters and gradients of the head, throughout the backward pass."""
    ahead: int
    """Gathered ahead, on the stream that gathers; part of the stages below."""
    expert_copy: int
    """The buffer of experts, on the same stream while it is copied out; part of `copied_out`."""
    copied_out: int
    """A block computes: its parameters, and what is gathered ahead."""
    gradients_ready: int
    """A block is done: its gradients beside its parameters."""
    between: int
    """Between two blocks: what is gathered ahead, and the sum of the unit that was done last."""
    block_sum: int
    """Sum of the block before, until the running block is as far."""
    root_sum: int
    """Sum of the root, with its gradients, at the end."""
    earlier_root_sum: int
    """Root gradients of the micro-batch before, until the first block is done."""


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
    """Return the buffers of each stage, with c bytes an element that computes and s an element of a sum.

    copied_out      = c (block + ahead + expert) + c expert
    gradients_ready = c (block + ahead + expert) + c unit_gradient
    between         = c (block + ahead) + sum of experts, or without experts of the block
    sum of a unit   = s (unit + unit / ranks): what is sent, and the share that comes back
    """
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
    """Return s (n + n / ranks): the bytes of the gradients that a unit sends, and of the share that it receives."""
    return STATE_BYTES[precision] * (elements + elements // ranks)


def _cuda_peaks(rank: RankTensors, layout: Layout, precision: Precision, accumulates: bool) -> list[CommBufferPeak]:
    """Return the moments on CUDA (torch/distributed/fsdp/_fully_shard of PyTorch 2.11).

    A block's gather is a buffer until the block computes, when it is copied out; the next one's is there by then
    (`FSDPParamGroup.wait_for_unshard`, `pre_backward`). When the block is done its parameters go, and its gradients are
    copied into what is sent, in the dtype of the sum (`post_backward`, `foreach_reduce`); that stays until the next
    unit is as far. So does the root's, from a micro-batch to the first block of the next one (`accumulates`; it goes
    after the last only, `_root_post_backward_final_callback`). Experts that have ranks of their own are units inside
    blocks.
    """
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
    """Bytes on the streams that FSDP2 has on CUDA, whose memory the allocator keeps apart."""

    side_streams: int
    """The most on those that gather and that sum."""
    largest_sum: int
    """On the stream that computes, the largest buffer of a sum."""


def fsdp_stream_buffers(rank: RankTensors, run: RunSpec, accumulation: int) -> StreamBuffers:
    """Return the most on each stream: on one the buffers of gathers, the root's and the first block's, or those of
    experts of two blocks, and a shard copied into one; on another the gradients of a step, and of one unit those that
    are added to them, or go to CPU memory."""
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
    # Buffers of experts and of blocks take turns: half of one is lost between them.
    gathered = max(root_full, 2 * expert_full + expert_full // 2, block_full) + block_full + max(block, expert)
    return StreamBuffers(
        COMPUTE_BYTES[precision] * gathered + STATE_BYTES[precision] * summed,
        STATE_BYTES[precision] * max(root_full, block_full, expert_full),
    )


def _combine_peaks(peaks: list[CommBufferPeak], other_peaks: list[CommBufferPeak]) -> list[CommBufferPeak]:
    """Return the moments of two kinds of tensors, each with the peak of the other kind."""
    max_bytes, max_other_bytes = (max((peak.bytes for peak in group), default=0) for group in (peaks, other_peaks))
    combined = [replace(peak, bytes=peak.bytes + max_other_bytes) for peak in peaks]
    return combined + [replace(peak, bytes=peak.bytes + max_bytes) for peak in other_peaks]


def _cpu_unit_peaks(
    shapes: Shapes, layout: Layout, ranks: int, precision: Precision, num_full_buffers: int, summed_twice: bool
) -> list[CommBufferPeak]:
    """Of ZeRO-3: what is gathered when the backward pass begins; when the first block's gradients are there, and the
    last one's; and at the backward pass's end those of the root unit, which is all that is in no block and stays
    gathered until then.

    Beside the root, `prefetch` blocks ahead and the block that computes are gathered (without `reshard` all), and when
    its gradients are copied to be sent, as much as is sent takes its place; those of the block before are then under
    way. Gradients wait in the dtype that computes, the head's all the time; they are sent and summed in the
    parameters' own (with no `num_full_buffers` something else is on its way then). What FSDP2 holds twice while it
    copies a block out of what was gathered is less (torch/distributed/fsdp/_fully_shard). `summed_twice`: a micro-
    batch's sums come beside those of the micro-batches before it (`parallel.data.fsdp`).
    """
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
    # Of the first block nothing is under way yet when its gradients are copied.
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
    """Return the elements that a rank owns, with padding, of each unit: the root, then every wrapped part."""
    owned = {"": 0}
    for name, shape in shapes.items():
        unit = fsdp_unit_of(name, layout)
        owned[unit] = owned.get(unit, 0) + max_shard_elements(shape, ranks)
    return list(owned.values())


def fsdp_unit_of(name: str, layout: Layout) -> str:
    """Return the wrapped part that a parameter is gathered with; "" for the root."""
    # "blocks.0.attention.wq.weight": a block is the first two names, a sublayer three. Recomputed blocks are whole.
    depth = {"model": 0, "block": 2, "sublayer": 2 if layout.activation_checkpointing == "full" else 3}[
        layout.fsdp_unit
    ]
    return ".".join(name.split(".")[:depth]) if name.startswith("blocks.") else ""

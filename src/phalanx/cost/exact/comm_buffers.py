"""Temporary communication buffers of each strategy: an upper bound of their size, and their time.

Symbols: N ranks that share one copy. A reduce-scatter sends a full buffer of N parts and receives one part. On a CPU,
where gloo has none, a second full buffer receives the data of all ranks (`parallel.comm.collectives`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import accumulate, pairwise
from operator import add

from phalanx.cost.exact.comm_buffer_peak import CommBufferPeak
from phalanx.cost.exact.derive.temporary import attention_exchange_bytes
from phalanx.cost.exact.forward_shape import forward_shape
from phalanx.cost.exact.fsdp_buffers import fsdp_buffer_peaks
from phalanx.cost.precision import COMPUTE_BYTES, STATE_BYTES
from phalanx.program.buckets import (
    PIECE_BYTES,
    chunk_by_bytes,
    ddp_bucket_names,
    may_reduce_together,
    zero_bucket_names,
)
from phalanx.program.messages import count_message_buffers
from phalanx.program.rank_tensors import RankTensors
from phalanx.schedule.schedule import Schedule
from phalanx.spec.layout import Layout
from phalanx.spec.parameter_shapes import Shapes, num_elements
from phalanx.spec.parts.block import blocks, residual_stream
from phalanx.spec.parts.operations import Shape
from phalanx.spec.precision import BF16_PRECISIONS, Precision
from phalanx.spec.resolved_run import ResolvedRun
from phalanx.spec.tensor_sharding import max_shard_elements


def comm_buffer_peaks(resolved: ResolvedRun, rank: RankTensors) -> list[CommBufferPeak]:
    """Return the communication buffers of a worker at the times at which its memory can peak.

    A parameter server's worker has none: it sends its gradients and receives its parameters in place, or on a GPU in
    CPU memory.
    """
    layout = resolved.layout
    precision = resolved.run.training.precision
    on_gpu = resolved.run.cluster.uses_cuda
    num_full_buffers = 1 if on_gpu and precision not in BF16_PRECISIONS else 2
    has_replicas = resolved.data_dims.dp_size > 1
    match resolved.strategy:
        case "ddp":
            # At the end of the step, all of these are in transit.
            other_shapes = rank.without_frozen(rank.expert if layout.pp == 1 else rank.all)
            dense_shapes = rank.without_frozen(rank.dense)
            peaks = ddp_buffers(dense_shapes, layout, STATE_BYTES[precision]) if layout.pp == 1 and has_replicas else []
            end_peak = CommBufferPeak(
                backward_fraction=1.0,
                bytes=STATE_BYTES[precision] * _bucket_elements(list(other_shapes.values())),
                moment="inside_block",
            )
            return [*peaks, end_peak] if other_shapes and (has_replicas or rank.expert) else peaks
        case "zero1" | "zero2":
            return zero_buffers(
                rank,
                layout,
                precision,
                full_gradients=resolved.strategy == "zero1",
                num_full_buffers=num_full_buffers,
            )
        case "zero3" | "hsdp":
            return fsdp_buffer_peaks(resolved, rank)
        case "parameter_server":
            return []


def cuda_exchange_bytes(resolved: ResolvedRun) -> int:
    """Return an upper estimate of the concurrent bytes of model-parallel communication inside blocks on CUDA, else 0.

    Tensor-parallel ranks reserve as much as four tensors of all tokens, without sequence parallelism two: a gathered
    input, and a term of the sum before and after the exchange. Rows of experts exist before sorting, and as input and
    output of an all-to-all.
    """
    run = resolved.run
    layout = run.layout
    if not run.cluster.uses_cuda:
        return 0
    shape = forward_shape(resolved)
    parts = {branch.part for block in set(blocks(run.model, layout)) for branch in block}
    exchanged_bytes = max(attention_exchange_bytes(part, shape) for part in parts if part.kind == "attention")
    if layout.tp > 1:
        num_buffers = 4 if layout.sequence_parallel else 2
        exchanged_bytes += num_buffers * shape.tokens * (run.model.hidden_size + 1) * shape.compute_bytes
    if layout.ep > 1 and run.model.moe:
        rows = run.model.moe.top_k * shape.residual_tokens
        exchanged_bytes += 3 * rows * run.model.hidden_size * shape.compute_bytes
    return exchanged_bytes


def pipeline_buffer_bytes(resolved: ResolvedRun, schedule: Schedule, pp_rank: int) -> int:
    """Return the bytes of messages between pipeline stages: posted receives on every link, and one send."""
    message_bytes = forward_shape(resolved).value_bytes(residual_stream(resolved.run.model))
    return message_bytes * count_message_buffers(schedule, pp_rank)


def ddp_buffers(shapes: Shapes, layout: Layout, bytes_per_element: int) -> list[CommBufferPeak]:
    """Return DDP's buffers in addition to the buckets, of which gradients are views.

    With compression to bf16, a bucket of fp32 has a copy of half its size during its all-reduce; one copy is counted.
    PowerSGD saves the compression error, and a copy of a bucket; its thin matrices are small.
    """
    if layout.gradient_compression == "none":
        return []
    buckets = ddp_bucket_names(shapes, layout, bytes_per_element)
    sizes = [_bucket_elements([shapes[name] for name in bucket]) for bucket in buckets]
    copied_bytes, unsent_bytes = (
        (2, 0) if layout.gradient_compression == "bf16" else (bytes_per_element, bytes_per_element * sum(sizes))
    )
    fractions = [sent_elements / sum(sizes) for sent_elements in accumulate(sizes)]
    return [
        CommBufferPeak(backward_fraction=0.0, bytes=unsent_bytes, moment="backward_start"),
        *(
            CommBufferPeak(backward_fraction=fraction, bytes=unsent_bytes + copied_bytes * size, moment="inside_block")
            for fraction, size in zip(fractions, sizes, strict=True)
        ),
    ]


def zero_buffers(
    rank: RankTensors, layout: Layout, precision: Precision, full_gradients: bool, num_full_buffers: int
) -> list[CommBufferPeak]:
    """Return the buffers of ZeRO-1 or ZeRO-2.

    Each bucket is reduce-scattered when its gradients are complete, with padded rows, and possibly together with the
    one before (`MAX_BUCKETS_IN_FLIGHT` is two). Meanwhile ZeRO-2 accumulates gradients of the next bucket. Two buckets
    are gathered at a time, each with an N-th and the full bucket: the first of the model once their piece has been
    updated, the others in the next forward pass, which has no gradients. Offloaded rows are all gathered in the update.

    Args:
        full_gradients: True for ZeRO-1, False for ZeRO-2.
        num_full_buffers: Full buffers of a reduce-scatter: two on a CPU and in bf16, else one.
    """
    shapes = rank.all
    bytes_per_element = COMPUTE_BYTES[precision]
    ranks = list[int]()
    owned = list[int]()
    buckets = zero_bucket_names(rank, layout, bytes_per_element)
    if not buckets:
        return []
    for bucket in buckets:
        ranks.append(rank.shards_of(bucket[0]))
        owned.append(sum(max_shard_elements(shapes[name], ranks[-1]) for name in bucket))
    next_bucket_elements = [
        0 if full_gradients else _bucket_elements([shapes[name] for name in bucket]) for bucket in [*buckets[1:], []]
    ]
    fractions = _completed_fractions([sum(num_elements(shapes[name]) for name in bucket) for bucket in buckets])
    block_fractions = _completed_fractions(
        [sum(num_elements(shapes[name]) for name in bucket if name.startswith("blocks.")) for bucket in buckets]
    )
    messages = [bytes_per_element * size * n for size, n in zip(owned, ranks, strict=True)]
    are_concurrent = [may_reduce_together(*pair, layout.offload) for pair in pairwise([0, *messages])]
    # A single rank sends nothing and copies nothing.
    reduced = [size * (num_full_buffers * n + 1) if n > 1 else 0 for size, n in zip(owned, ranks, strict=True)]
    gathered = [size * (n + 1) if n > 1 else 0 for size, n in zip(owned, ranks, strict=True)]
    in_flight = map(add, _with_previous(reduced, are_concurrent), next_bucket_elements)
    gathers = _with_previous(gathered, [True] * len(buckets))
    first_piece, *_ = chunk_by_bytes(
        owned[::-1], PIECE_BYTES[layout.offload], lambda elements: STATE_BYTES[precision] * elements
    )

    def peak(bucket: int, elements: int, kept_gradients: float = 1.0) -> CommBufferPeak:
        return CommBufferPeak(
            backward_fraction=block_fractions[bucket],
            gradient_fraction=fractions[bucket],
            bytes=bytes_per_element * elements,
            # The last bucket contains the embedding, whose gradient follows that of the first block.
            moment="after_block" if bucket == len(buckets) - 1 else "inside_block",
            kept_gradients=kept_gradients,
        )

    peaks = [peak(bucket, elements) for bucket, elements in enumerate(in_flight) if elements]
    updating = peak(-1, max(gathers))
    if layout.offload == "none":
        peaks += [peak(bucket, elements, kept_gradients=0.0) for bucket, elements in enumerate(gathers) if elements]
        updating = peak(-1, gathers[-1], kept_gradients=[0.0, *fractions][-1 - len(first_piece)])
    return [*peaks, replace(updating, moment="in_update")]


def _completed_fractions(sizes: list[int]) -> list[float]:
    """Return the fraction of the sum that each size completes; all of a sum of 0."""
    return [size / sum(sizes) if sum(sizes) else 1.0 for size in accumulate(sizes)]


def _with_previous(sizes: list[int], are_concurrent: Iterable[bool]) -> list[int]:
    """Return the size of the buffers of each bucket, with those of the bucket before where both exist at a time."""
    return [
        size + previous * is_concurrent
        for (previous, size), is_concurrent in zip(pairwise([0, *sizes]), are_concurrent, strict=True)
    ]


def parameter_server_buffers(owned_bytes: int, workers: int, staleness: int | None) -> int:
    """Return the bytes of a server's buffers.

    They contain one worker's gradients. Asynchronously they contain s + 1 gradients of every worker, and s + 1 copies
    of the weights in transit. `staleness` is s, or None for synchronous training.
    """
    return owned_bytes if staleness is None else (workers + 1) * (staleness + 1) * owned_bytes


def _bucket_elements(bucket: list[Shape]) -> int:
    return sum(map(num_elements, bucket))

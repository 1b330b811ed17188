"""What ranks need for a moment to send and receive: for each strategy an upper bound of what it holds, and when.

Symbols: N ranks that share one copy. A reduce-scatter sends a whole buffer of N parts, and an N-th comes of it; on a
CPU, where gloo has none, a second whole buffer receives what all ranks send (`parallel.comm.collectives`)."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from itertools import accumulate, pairwise

from phalanx.cost.exact.fsdp_buffers import CommBufferPeak, fsdp_buffer_peaks
from phalanx.cost.exact.parameter_shapes import Shape, Shapes, max_shard_elements, num_elements
from phalanx.cost.exact.rank_tensors import RankTensors
from phalanx.cost.formulas.collectives import Strategy
from phalanx.cost.precision import COMPUTE_BYTES, STATE_BYTES
from phalanx.schedule.registry import representative_schedule
from phalanx.schedule.schedule import MAX_POSTED_RECEIVES
from phalanx.spec.formatting import MIB
from phalanx.spec.layout import Layout
from phalanx.spec.parallel_dims import ParallelDims
from phalanx.spec.run import RunSpec


def comm_buffer_peaks(
    rank: RankTensors, run: RunSpec, strategy: Strategy, dims: ParallelDims, accumulation: int
) -> list[CommBufferPeak]:
    """The moments at which a rank that computes may hold most, under the strategy that its layout comes to; of its
    tensors, experts may have ranks of their own. A parameter server's worker has none: what it sends and receives are
    its gradients and parameters, or on a GPU in CPU memory."""
    layout = run.layout
    precision = run.training.precision
    on_gpu = run.cluster.uses_cuda
    num_full_buffers = 1 if on_gpu else 2
    match strategy:
        case "ddp":
            other_shapes = (
                rank.expert if layout.pp == 1 else rank.all
            )  # at the step's end all of these are on their way
            peaks = (
                ddp_buffers(rank.dense, layout, STATE_BYTES[precision]) if layout.pp == 1 and dims.dp_size > 1 else []
            )
            end_peak = CommBufferPeak(1.0, STATE_BYTES[precision] * _bucket_elements(list(other_shapes.values())))
            return [*peaks, end_peak] if other_shapes and (dims.dp_size > 1 or rank.expert) else peaks
        case "zero1" | "zero2":
            peaks = zero_buffers(
                rank,
                layout,
                COMPUTE_BYTES[precision],
                full_gradients=strategy == "zero1",
                num_full_buffers=num_full_buffers,
            )
            return [replace(peak, backward_fraction=1.0) for peak in peaks] if layout.pp > 1 else peaks
        case "zero3" | "hsdp":
            return fsdp_buffer_peaks(rank, run, accumulation, has_replicas=dims.dp_replicate > 1)
        case "parameter_server":
            return []


def activation_exchange_bytes(run: RunSpec, batch: int) -> int:
    """Of what ranks that share a model send each other of activations and gradients inside blocks, an upper estimate of
    what is on its way at one time, for micro-batches of `batch` sequences.

    Tensor-parallel ranks have two gathered inputs and a term of the sum before and after it, or without sequence
    parallelism a sum and the copy that it is made in; around a ring go keys and values and their gradients, two of each
    (one that comes); an all-to-all has what goes and what comes, one of experts also the rows before their sorting.
    """
    spec = run.model
    layout = run.layout
    tokens, residual_tokens = _token_counts(run, batch)
    elements = 0
    ring_elements = 0
    if layout.tp > 1:
        elements += (4 if layout.sequence_parallel else 2) * tokens * (spec.hidden_size + 1)
        # Queries and keys as they come, side by side, and with their gradients on the way.
        elements += 4 * tokens * spec.num_heads * spec.head_dim if layout.tp_attention == "gathered" else 0
    if layout.cp > 1:
        kv = -(-spec.num_kv_heads // layout.tp)
        q = -(-spec.num_heads // layout.tp)
        if layout.cp_method == "ring":
            ring_elements = 8 * kv * tokens * spec.head_dim
        else:
            elements += 2 * (q + 2 * max(kv, layout.cp)) * tokens * spec.head_dim
    if layout.ep > 1 and spec.moe:
        elements += 3 * spec.moe.top_k * residual_tokens * spec.hidden_size
    compute_bytes = COMPUTE_BYTES[run.training.precision]
    exact_bytes = max(4, compute_bytes)
    # On CUDA all but a ring's sums are in what products compute in; on a CPU this is an upper estimate.
    return exact_bytes * ring_elements + (compute_bytes if run.cluster.uses_cuda else exact_bytes) * elements


def pipeline_buffer_bytes(run: RunSpec, batch: int, pp_rank: int) -> int:
    """Of what the stages of a pipeline send each other: on every link some are received ahead, and one is sent."""
    links = [link for link in representative_schedule(run.layout).links if pp_rank in link]
    num_messages = sum(MAX_POSTED_RECEIVES if receiver == pp_rank else 1 for _, receiver in links)
    compute_bytes = COMPUTE_BYTES[run.training.precision]
    # On CUDA counted as they are: under autocast the residual stream is in the parameters' fp32.
    is_exact = run.cluster.uses_cuda and run.layout.data_parallel != "ddp"
    message_bytes = compute_bytes if is_exact else max(4, compute_bytes)
    return message_bytes * num_messages * _token_counts(run, batch)[1] * run.model.hidden_size


def _token_counts(run: RunSpec, batch: int) -> tuple[int, int]:
    """Of a micro-batch: those that products are given, and those of the residual stream on a rank."""
    tokens = batch * run.training.seq_len // run.layout.cp
    return tokens, tokens // run.layout.tp if run.layout.sequence_parallel else tokens


def ddp_buffers(shapes: Shapes, layout: Layout, bytes_per_element: int) -> list[CommBufferPeak]:
    """Gradients are views of what is sent. Compressed to bf16, a bucket (of fp32) has a copy of half its size on the
    way when its gradients are there; one is counted. PowerSGD keeps what it did not send (its thin matrices are small),
    and a copy of a bucket."""
    if layout.gradient_compression == "none":
        return []
    sizes = [_bucket_elements(bucket) for bucket in bucket_sizes(shapes, layout.bucket_mb * MIB / bytes_per_element)]
    copied_bytes, unsent_bytes = (
        (2, 0) if layout.gradient_compression == "bf16" else (bytes_per_element, bytes_per_element * sum(sizes))
    )
    fractions = [sent_elements / sum(sizes) for sent_elements in accumulate(sizes)]
    return [
        CommBufferPeak(0.0, unsent_bytes),
        *(
            CommBufferPeak(fraction, unsent_bytes + copied_bytes * size)
            for fraction, size in zip(fractions, sizes, strict=True)
        ),
    ]


def zero_buffers(
    rank: RankTensors, layout: Layout, bytes_per_element: int, full_gradients: bool, num_full_buffers: int
) -> list[CommBufferPeak]:
    """Of ZeRO-1 (`full_gradients`) or ZeRO-2, each bucket's reduce-scatter when its gradients are there, beside which
    ZeRO-2 keeps those of the next bucket until they are all there; and after the update the gathers of a bucket and of
    the one before it, each of an N-th and the whole. Buckets are as `parallel.data.zero` cuts them, with padded rows;
    those of offload may be smaller."""
    shapes = rank.all
    ranks = list[int]()
    owned = list[int]()
    buckets = bucket_names(shapes, layout.bucket_mb * MIB / bytes_per_element, rank.expert)
    for bucket in buckets:
        ranks.append(rank.expert_shards if bucket[0] in rank.expert else rank.shards)
        owned.append(sum(max_shard_elements(shapes[name], ranks[-1]) for name in bucket))
    next_bucket_elements = [
        0 if full_gradients else _bucket_elements([shapes[name] for name in bucket]) for bucket in [*buckets[1:], []]
    ]
    fractions = [size / sum(owned) for size in accumulate(owned)]
    # Alone a rank sends nothing, and copies nothing.
    reduce_elements = [
        (shard * (num_full_buffers * n + 1) if n > 1 else 0) + next_elements
        for shard, n, next_elements in zip(owned, ranks, next_bucket_elements, strict=True)
    ]
    gather_elements = [shard * (n + 1) if n > 1 else 0 for shard, n in zip(owned, ranks, strict=True)]
    max_gather_elements = max(sum(pair) for pair in pairwise([0, *gather_elements]))
    points = [*zip(fractions, reduce_elements, strict=True), (1.0, max_gather_elements)]
    return [CommBufferPeak(fraction, bytes_per_element * size) for fraction, size in points if size]


def parameter_server_buffers(owned_bytes: int, workers: int, staleness: int | None) -> int:
    """Room for one worker's gradients; asynchronously for s + 1 of every worker's, and s + 1 copies of the weights on
    their way (s = `staleness`)."""
    return owned_bytes if staleness is None else (workers + 1) * (staleness + 1) * owned_bytes


def bucket_sizes(shapes: Shapes, limit: float) -> list[list[Shape]]:
    """Parameters sent at once (see `bucket_names`)."""
    return [[shapes[name] for name in bucket] for bucket in bucket_names(shapes, limit)]


def bucket_names(shapes: Shapes, limit: float, expert_names: Container[str] = ()) -> list[list[str]]:
    """Parameters sent at once, the last of the model first: a bucket is full when it has `limit` numbers or more, or
    when the next parameter goes to other ranks, as those of `expert_names` do."""
    buckets: list[list[str]] = []
    size = 0
    for name in reversed(shapes):
        if not buckets or size >= limit or (name in expert_names) != (buckets[-1][0] in expert_names):
            buckets.append([])
            size = 0
        buckets[-1].append(name)
        size += num_elements(shapes[name])
    return buckets


def _bucket_elements(bucket: list[Shape]) -> int:
    return sum(map(num_elements, bucket))

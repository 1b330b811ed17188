"""What a process takes of a GPU beside the tensors that it allocates: the driver's context and NCCL's buffers.

Both are other people's measurements, of which there are few; `phalanx calibrate` puts a machine's own in their place.
"""

from __future__ import annotations

from phalanx.cost.exact.rank_tensors import RankTensors
from phalanx.cost.precision import COMPUTE_BYTES
from phalanx.spec.layout import SHARDED_STRATEGIES
from phalanx.spec.parallel_dims import ParallelDims, parallel_dims
from phalanx.spec.run import RunSpec

CONTEXT_BYTES = 426 * 2**20
"""Of a process that has done nothing yet, with kernels loaded when they are first used: 426 MiB with PyTorch 2.10 for
CUDA 13 on an RTX 6000 Ada (unslothai/unsloth-zoo pull request 1053)."""
COLLECTIVE_BYTES = 610_000_000
"""Of a communicator that gathers, reduces and broadcasts: on 8 H100 a process had 1.06 GB outside of PyTorch's tensors
(NVIDIA/nccl issue 1685), of which the context is 0.45."""
PEER_BYTES = 469_000_000
"""Of a communicator, for each rank over NVLink that it sends to and receives from: an all-to-all of 8 H100 brought
the 1.06 GB to 4.34, for 7 peers with 32 channels of about 12 MiB each (the same issue)."""

LOST_SHARE = 0.55
"""Of the largest tensor. It suits the 53 ranks of docs/accuracy.md ("Memory on CUDA") best, which need 0 to 1.2."""


def nccl_bytes(run: RunSpec, world_size: int) -> int:
    """Bytes of NCCL's communicators on a rank: of each group that the layout makes, and of each peer within a node.

    Between nodes sends share one small buffer (NVIDIA/nccl issue 1450), which is not counted.
    """
    dims = parallel_dims(run.layout, world_size)
    num_collective = _num_collective_groups(run, dims)
    peers = sum(min(count, run.cluster.fast_link_domain_size - 1) for count in _num_peers(run, dims))
    return num_collective * COLLECTIVE_BYTES + peers * PEER_BYTES if world_size > 1 else 0


def gap_bytes(run: RunSpec, batch: int, rank: RankTensors, largest_sum: int) -> int:
    """Bytes that the allocator reserves on the stream that computes beyond the most that is allocated there: a share of
    the largest tensor that comes and goes, which does not fit where smaller ones were.

    Segments must be expandable (PYTORCH_ALLOC_CONF=expandable_segments:True), as they are in `phalanx train`.

    Args:
        batch: Sequences of a micro-batch.
        largest_sum: Bytes of the largest buffer whose gradients are summed.
    """
    has_head = "norm.weight" in rank.dense
    precision, vocab = run.training.precision, -(-run.model.vocab_size // run.layout.tp)
    logits_bytes = max(4, COMPUTE_BYTES[precision]) * batch * run.training.seq_len // run.layout.cp * vocab
    return round(LOST_SHARE * max(largest_sum, logits_bytes if has_head else 0))


def _num_collective_groups(run: RunSpec, dims: ParallelDims) -> int:
    """Groups of ranks that reduce or gather: all ranks, and those of every axis that are not all of them."""
    data_dims = dims.with_cp_as_data_parallel(sharded=run.layout.data_parallel in SHARDED_STRATEGIES)
    sizes = [data_dims.dp_shard, data_dims.dp_replicate, dims.tp]
    if dims.ep > 1:
        sizes.append(dims.dp_size * dims.cp * dims.tp // dims.ep)
    return 1 + sum(1 < size < dims.world_size for size in sizes)


def _num_peers(run: RunSpec, dims: ParallelDims) -> list[int]:
    """Of each group that sends from rank to rank: around a ring or along a pipeline, which has a group each way, to one
    neighbor and from another; in an all-to-all, all others."""
    ring = run.layout.cp_method == "ring"
    return [
        min(2, dims.cp - 1) if ring else dims.cp - 1,
        dims.ep - 1,
        *([1, 1] if dims.pp == 2 else [2, 2] if dims.pp > 2 else []),
    ]

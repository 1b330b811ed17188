"""GPU memory of a process outside its tensors: the driver's context and NCCL's buffers.

Others measured both on few machines; `phalanx calibrate` replaces them with a machine's own values.
"""

from __future__ import annotations

from phalanx.cost.exact.forward_shape import forward_shape
from phalanx.program.rank_tensors import RankTensors
from phalanx.spec.communication_groups import MAX_PIPELINE_CHANNELS
from phalanx.spec.layout import ZERO_STRATEGIES
from phalanx.spec.parallel_dims import ParallelDims
from phalanx.spec.precision import BF16_PRECISIONS
from phalanx.spec.resolved_run import ResolvedRun

CONTEXT_BYTES = 426 * 2**20
"""Memory of an idle process whose kernels are loaded at first use.

426 MiB with PyTorch 2.10 for CUDA 13 on an RTX 6000 Ada (unslothai/unsloth-zoo pull request 1053).
"""
COLLECTIVE_BYTES = 610_000_000
"""Memory of a communicator that gathers, reduces and broadcasts.

On 8 H100 a process had 1.06 GB outside of PyTorch's tensors (NVIDIA/nccl issue 1685), of which the context is 0.45.
"""
PEER_BYTES = 469_000_000
"""Memory of a communicator per NVLink peer that a rank sends to and receives from.

An all-to-all of 8 H100 increased the 1.06 GB to 4.34, for 7 peers (the same issue).
"""
PEER_CHANNELS = 32
"""Channels of these peers, of about 12 MiB each."""
PIPELINE_PEER_BYTES = PEER_BYTES * MAX_PIPELINE_CHANNELS // PEER_CHANNELS

LOST_SHARE = 0.4
"""Fraction of the largest tensor that is lost in gaps.

The value is the best fit to the 54 ranks of docs/results/accuracy.md ("Memory on CUDA").
"""


def nccl_bytes(resolved: ResolvedRun) -> int:
    """Return the bytes of NCCL's communicators on a rank: of all groups, and of peers on fast links.

    Between nodes, sends share one small buffer (NVIDIA/nccl issue 1450), which is not counted.
    """
    if resolved.world_size == 1:
        return 0
    dims = resolved.dims
    sizes = [resolved.data_dims.dp_shard, resolved.data_dims.dp_replicate, dims.tp]
    if dims.ep > 1:
        sizes.append(dims.expert_dp_size)
    # All ranks, and smaller groups of every axis, reduce or gather.
    num_groups = 1 + sum(1 < size < dims.world_size for size in sizes)
    # A pipeline has two groups, one per direction, each with two neighbors, or one in a pipeline of two stages.
    num_neighbors = 2 * min(2, dims.pp - 1, resolved.run.cluster.fast_link_domain_size - 1)
    return num_groups * COLLECTIVE_BYTES + _num_peers(resolved) * PEER_BYTES + num_neighbors * PIPELINE_PEER_BYTES


def gap_bytes(resolved: ResolvedRun, rank: RankTensors, largest_sum: int) -> int:
    """Return the bytes that the allocator reserves on the compute stream beyond its allocated peak.

    They are a fraction of the largest temporary tensor, which does not fit into the gaps of smaller ones. Segments must
    be expandable (PYTORCH_ALLOC_CONF=expandable_segments:True), as they are in `phalanx train`. `largest_sum` is the
    largest buffer of a gradient reduction, in bytes.
    """
    if "norm.weight" not in rank.dense:  # no head
        return round(LOST_SHARE * largest_sum)
    spec = resolved.run.model
    shape = forward_shape(resolved)
    logits_bytes = shape.compute_bytes * shape.logits_rows(spec) * shape.max_local_count(spec.vocab_size)
    return round(LOST_SHARE * max(largest_sum, logits_bytes))


def _num_peers(resolved: ResolvedRun) -> int:
    """Return the number of fast-link peers that a rank sends to in rings and all-to-alls, over all groups.

    A reduce-scatter of bf16 is an all-to-all (`parallel.comm.collectives.ReduceScatter`), and Muon exchanges its
    matrices by all-to-alls.
    """
    run = resolved.run
    layout = run.layout
    dims = resolved.dims
    domain = run.cluster.fast_link_domain_size
    in_stage = _stage_ranks_in_domain(dims, domain)
    is_bf16 = run.training.precision in BF16_PRECISIONS
    has_muon = run.optimizer.name == "muon"
    reduces_bf16 = is_bf16 and layout.data_parallel in ZERO_STRATEGIES
    cp_peers = _peers(dims.cp, domain // dims.tp)
    peers = (min(2, cp_peers) if layout.cp_method == "ring" else cp_peers) + _peers(dims.ep, in_stage)
    if reduces_bf16 or has_muon:
        peers += _peers(resolved.data_dims.dp_shard, in_stage // dims.tp)
    if reduces_bf16 and dims.ep > 1:
        peers += _peers(dims.expert_dp_size, in_stage // dims.ep)
    if (is_bf16 and layout.sequence_parallel) or has_muon:
        peers += _peers(dims.tp, domain)
    return peers


def _peers(group_size: int, num_in_domain: int) -> int:
    """Return the number of other ranks of a group that are in the same fast-link domain."""
    return max(0, min(group_size, num_in_domain) - 1)


def _stage_ranks_in_domain(dims: ParallelDims, domain: int) -> int:
    """Return the number of ranks of one pipeline stage that one fast-link domain contains."""
    share = dims.cp * dims.tp
    stages_between = 1 if dims.pipeline_outermost else dims.pp
    return min(domain, share * max(1, domain // (share * stages_between)))

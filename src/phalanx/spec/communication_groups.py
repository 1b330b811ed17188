"""Process groups for each purpose of communication."""

from __future__ import annotations

from typing import Literal

from phalanx.spec.parallel_dims import ParallelDims, expert_parallel_groups, pipeline_stage_groups, process_groups
from phalanx.spec.run import RunSpec
from phalanx.spec.tensor_sharding import head_replications

GroupKind = Literal[
    "data",
    "replicas",
    "same_experts",
    "expert_replicas",
    "tp",
    "copies",
    "parts",
    "cp",
    "ep",
    "pp",
    "ends",
    "losses",
    "servers",
]
"""Kinds of process groups. data: ranks that share one copy of all non-expert parameters (with ddp, ranks with one copy
each). replicas: ranks with the same shard of different copies. same_experts, expert_replicas: the equivalents of these
two for experts under expert parallelism. tp, cp, ep, pp: the mesh axes. copies: tensor-parallel neighbors with the same
key/value heads, of the kind of layers where these are most. parts: tensor-parallel ranks with different key/value
heads. ends: the first and the last stage.
losses: ranks whose losses are terms of one sum. servers: servers and workers."""
MAX_PIPELINE_CHANNELS = 4
"""NCCL channels for pipeline messages; a channel is a block on an SM. Receives are posted ahead, and a channel that
waits for a message occupies its SMs. NCCL's default is up to 32 channels in each direction."""
Group = tuple[int, ...]
"""Ranks in ascending order."""


def communication_groups(run: RunSpec, dims: ParallelDims, kind: GroupKind) -> list[Group]:
    """Return all groups of a kind.

    Every rank is in exactly one group; servers are in none. Only groups of kind `pp`, `ends` and `losses` span pipeline
    stages; `ends` are returned as full pipelines.
    """
    is_hybrid = run.layout.data_parallel == "hsdp"
    match kind:
        case "data":
            return process_groups(dims, *(("dp_shard", "cp") if is_hybrid else ("dp_replicate", "dp_shard", "cp")))
        case "replicas":
            return process_groups(dims, "dp_replicate")
        case "same_experts" | "expert_replicas":
            size = dims.dp_size * dims.cp * dims.tp // (dims.dp_replicate if is_hybrid else 1)
            stages = [
                [ranks[start : start + size] for start in range(0, len(ranks), size)]
                for ranks in pipeline_stage_groups(dims)
            ]
            if kind == "same_experts":
                return [ranks[start :: dims.ep] for copies in stages for ranks in copies for start in range(dims.ep)]
            return [ranks for copies in stages for ranks in zip(*copies, strict=True)]
        case "copies" | "parts":
            size = max(count for count in head_replications(run.model, dims.tp) if count < dims.tp)
            tp_groups = process_groups(dims, "tp")
            if kind == "parts":
                return [ranks[start::size] for ranks in tp_groups for start in range(size)]
            return [ranks[start : start + size] for ranks in tp_groups for start in range(0, dims.tp, size)]
        case "ep":
            return expert_parallel_groups(dims)
        case "ends":
            return process_groups(dims, "pp")
        case "losses":
            return process_groups(dims, "dp_replicate", "dp_shard", "cp", "pp")
        case _:
            return process_groups(dims, kind)


def group_ranks(run: RunSpec, dims: ParallelDims, kind: GroupKind, rank: int) -> Group:
    """Return the ranks of one group of a kind. A server is in no group."""
    return next(ranks for ranks in communication_groups(run, dims, kind) if rank in ranks)

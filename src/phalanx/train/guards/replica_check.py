"""Check that replicated parameters, buffers and optimizer state are bitwise equal on all ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.debug.collective_log import minority_ranks
from phalanx.debug.hang_evidence import format_coordinates
from phalanx.parallel.comm.host_copy import copy_to_host
from phalanx.parallel.comm.objects import broadcast_object
from phalanx.parallel.dtensor_shards import local_shape_and_offset, local_tensor
from phalanx.parallel.module_tensors import named_parameters
from phalanx.parallel.strategy import Strategy
from phalanx.runs.errors import CorruptionError
from phalanx.spec.parallel_dims import ParallelDims
from phalanx.train.checkpoint.state import checkpoint_tensors

CHUNK_ELEMENTS = 2**20
"""Number of elements that are hashed together: each needs 8 bytes of temporary memory."""
BIT_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
MAX_RANKS_SHOWN = 8
COMPUTE_PREFIX = "computing"


@dataclass(frozen=True, kw_only=True)
class ReplicaMismatch:
    """A tensor whose replicas differ."""

    key: int
    ranks: tuple[int, ...]
    """Ranks that differ from the majority, or all holders of the tensor if there is no majority."""
    holders: tuple[int, ...]
    num_tensors: int
    """Number of tensors that differ, of which this is the first."""


def check_replica_consistency(
    strategy: Strategy, optimizers: list[torch.optim.Optimizer], sizes: ParallelDims, step: int, every: int
) -> CorruptionError | None:
    """Compare the replicas of all tensors after `step`, and return the error to raise, if any.

    This is a collective; the error is that of the first tensor that differs, and is equal on all ranks. `every` is the
    interval of the checks in steps."""
    if not dist.is_initialized():
        return None
    strategy.wait_for_weights()
    local_hashes = {key: (name, value) for key, name, value in _hash_tensors(strategy, optimizers)}
    mismatch = find_mismatch(_gather_hashes({key: value for key, (_, value) in local_hashes.items()}))
    if mismatch is None:
        return None
    name = broadcast_object(local_hashes[mismatch.key][0] if mismatch.key in local_hashes else "", mismatch.holders[0])
    suspects = [] if mismatch.ranks == mismatch.holders else mismatch.ranks
    return CorruptionError(describe_mismatch(mismatch, name, sizes, step, every), suspects)


def find_mismatch(tables: Sequence[Mapping[int, int]]) -> ReplicaMismatch | None:
    """Return the first tensor whose hashes differ, in the order of the first rank that holds such a tensor.

    `tables` lists the hashes of each rank by shard id."""
    hashes_by_key: dict[int, dict[int, int]] = defaultdict(dict)
    for rank, table in enumerate(tables):
        for key, value in table.items():
            hashes_by_key[key][rank] = value
    differing_keys = [key for key, values in hashes_by_key.items() if len(set(values.values())) > 1]
    if not differing_keys:
        return None
    values = hashes_by_key[differing_keys[0]]
    return ReplicaMismatch(
        key=differing_keys[0],
        ranks=tuple(minority_ranks(values)),
        holders=tuple(values),
        num_tensors=len(differing_keys),
    )


def describe_mismatch(mismatch: ReplicaMismatch, name: str, sizes: ParallelDims, step: int, every: int) -> str:
    """Return the error message of a mismatch in the tensor `name`, with checks every `every` steps."""
    ranks = [f"rank {rank} ({format_coordinates(sizes, rank)})" for rank in mismatch.ranks[:MAX_RANKS_SHOWN]]
    rank_names = ", ".join(ranks) + (", ..." if len(mismatch.ranks) > MAX_RANKS_SHOWN else "")
    is_tie = set(mismatch.ranks) == set(mismatch.holders)
    num_others = len(mismatch.holders) - len(mismatch.ranks)
    where = f"between {rank_names}" if is_tie else f"on {rank_names} from the {num_others} other ranks"
    more = f", and {mismatch.num_tensors - 1} more tensors" if mismatch.num_tensors > 1 else ""
    before = "it was not compared before"
    advice = "restart the run"
    if step > every:
        before = f"it was equal after step {step - every}"
        advice = f"--resume from a checkpoint of step {step - every} or before"
    return (
        f"step {step}: {name} differs {where}, where it must be equal{more}; {before}. A device or its memory corrupts "
        f"data silently: test these hosts or exclude them, and {advice}"
    )


def tensor_hash(tensor: Tensor) -> Tensor:
    """Return a 64-bit hash (int64, on the tensor's device) that any single changed bit changes.

    It is the sum over elements of their bits times odd numbers that increase with the index, modulo 2**64."""
    flat = tensor.detach().contiguous().flatten()
    bits = flat.view(BIT_DTYPES[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, len(bits), CHUNK_ELEMENTS):
        chunk = bits[start : start + CHUNK_ELEMENTS].long()
        total += (chunk * torch.arange(2 * start + 1, 2 * (start + len(chunk)) + 1, 2, device=flat.device)).sum()
    return total


def _hash_tensors(strategy: Strategy, optimizers: list[torch.optim.Optimizer]) -> Iterator[tuple[int, str, int]]:
    """Yield shard id, name and hash of each tensor of this rank."""
    tensors = checkpoint_tensors(strategy, optimizers)
    stored = {id(parameter) for parameter in strategy.stored_parameters.values()}
    for name, parameter in named_parameters(strategy.module):
        # Where ranks train only rows of the parameters, the parameters that compute are checked too.
        if id(parameter) not in stored:
            tensors[f"{COMPUTE_PREFIX}.{name}"] = strategy.model_parallel.as_global_dtensor(name, parameter.detach())
    values = map(int, copy_to_host(*(tensor_hash(local_tensor(tensor)) for tensor in tensors.values())))
    for (name, tensor), value in zip(tensors.items(), values, strict=True):
        yield shard_id(name, tensor), name, value


def shard_id(name: str, tensor: Tensor) -> int:
    """Return an id that is equal on all ranks with this shard of this tensor, and on no other."""
    shape, offset = local_shape_and_offset(tensor)
    text = f"{name} {shape} {offset}"
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big", signed=True)


def _gather_hashes(local_hashes: Mapping[int, int]) -> list[dict[int, int]]:
    """Return the hashes of every rank, on every rank: 16 bytes per tensor."""
    ranks = dist.get_world_size()
    counts = [torch.zeros(1, dtype=torch.int64) for _ in range(ranks)]
    dist.all_gather(counts, torch.tensor([len(local_hashes)]))
    max_count = max(int(count) for count in counts)
    sent = torch.zeros(max_count, 2, dtype=torch.int64)
    if local_hashes:
        sent[: len(local_hashes)] = torch.tensor(list(local_hashes.items()))
    received = [torch.empty_like(sent) for _ in range(ranks)]
    dist.all_gather(received, sent)
    return [dict(table[: int(count)].tolist()) for table, count in zip(received, counts, strict=True)]

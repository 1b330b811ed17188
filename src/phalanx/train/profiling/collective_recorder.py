"""Every collective of a step: which operation, among how many ranks, how many bytes, how long, and how much of that
this rank stood still for."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from operator import itemgetter
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from phalanx.cost.formulas import collectives
from phalanx.cost.formulas.collectives import sent_bytes

OPERATION_NAMES = {
    "allreduce_": "all_reduce",
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "alltoall_base_": "all_to_all",
    "alltoall_": "all_to_all",
    "broadcast_": "broadcast",
    "send": "send",
    "recv_": "recv",
    "_allgather_into_tensor_out": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_reduce": "all_reduce",
    "reduce_scatter_tensor": "reduce_scatter",
}
"""PyTorch's operations, under the names of torch.distributed."""
NAMESPACES = ("c10d", "_c10d_functional")


@dataclass
class CollectiveCall:
    """One call. `size_bytes` is that of the whole: what is reduced or broadcast, what is gathered from all, what a rank
    has to scatter, exchange or send."""

    operation: str
    """What was asked for."""
    executed_as: str
    """The operation that did it."""
    group: tuple[int, ...]
    """Among which ranks of the run."""
    size_bytes: int
    start: float
    """By time.perf_counter()."""
    end: float | None = None
    """None where the backend does not tell: gloo of send and recv, and NCCL, whose futures are done as soon as a call
    is queued."""

    @property
    def ranks(self) -> int:
        """How many take part."""
        return len(self.group)

    @property
    def sent_bytes(self) -> float:
        """What a rank sends for it around a ring; nothing to receive."""
        if self.operation in ("send", "recv"):
            return self.size_bytes if self.operation == "send" else 0
        return sent_bytes(cast(collectives.Collective, self.operation), self.size_bytes, self.ranks)

    def exposed_seconds(self, waits: Sequence[tuple[float, float]]) -> float:
        """The seconds of it in which the rank waited, where `waits` are in the order of time."""
        total = 0.0
        for wait_start, wait_end in islice(waits, bisect_right(waits, self.start, key=itemgetter(1)), None):
            if self.end is None or wait_start >= self.end:
                break
            total += min(self.end, wait_end) - max(self.start, wait_start)
        return total


class CollectiveRecorder(TorchDispatchMode):
    """Notes the collectives issued inside, DDP's and FSDP's too. It slows every operation: for a step or two."""

    def __init__(self, requested_operation: Callable[[], str | None] = lambda: None) -> None:
        """`requested_operation` names what the operation under way stands for, if for another."""
        super().__init__()
        self.requested_operation = requested_operation
        self.calls: list[CollectiveCall] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        started_at = time.perf_counter()
        out = func(*args, **(kwargs or {}))
        operation = OPERATION_NAMES.get(func._schema.name.partition("::")[2]) if func.namespace in NAMESPACES else None
        if operation is not None:
            requested = self.requested_operation() or operation
            call = CollectiveCall(requested, operation, _group_ranks(args), _total_bytes(operation, args), started_at)
            self.calls.append(call)
            if not any(leaf.is_cuda for leaf in tree_leaves(args) if isinstance(leaf, Tensor)):
                _record_end(call, out)
        return out


def _group_ranks(args: Sequence[Any]) -> tuple[int, ...]:
    for argument in args:
        if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
            return ranks_of_group(dist.ProcessGroup.unbox(argument).group_name)
        if isinstance(argument, str):  # functional collectives name their group
            with suppress(LookupError, RuntimeError, ValueError):
                return ranks_of_group(argument)
    return tuple(range(dist.get_world_size()))


def ranks_of_group(name: str) -> tuple[int, ...]:
    """Return the global ranks of a process group."""
    # PyTorch knows the ranks of the group that it made, not of another object for it.
    return tuple(dist.get_process_group_ranks(c10d._resolve_process_group(name)))  # type: ignore[arg-type, attr-defined]


def _total_bytes(operation: str, args: Sequence[Any]) -> int:
    sizes = [sum(leaf.nbytes for leaf in tree_leaves(argument) if isinstance(leaf, Tensor)) for argument in args]
    # Outputs come before inputs, where there are both; the larger is the whole.
    return sizes[1] if operation == "all_to_all" else max(sizes)


def _record_end(call: CollectiveCall, out: Any) -> None:
    def on_done(_: Any) -> None:
        call.end = time.perf_counter()

    for leaf in tree_leaves(out):
        if isinstance(leaf, torch.ScriptObject):
            with suppress(RuntimeError):  # gloo has no future of a send or a recv
                dist.Work.unbox(leaf).get_future().add_done_callback(on_done)

"""Recorder of every collective of a step: operation, ranks, bytes, duration and exposed time."""

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
from phalanx.parallel.comm.device_clock import HOST_CLOCK, DeviceClock, Timestamp

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
"""PyTorch's operations, by the names of torch.distributed."""
NAMESPACES = ("c10d", "_c10d_functional")
POINT_TO_POINT = ("send", "recv")


@dataclass(kw_only=True)
class CollectiveCall:
    """One call of a collective.

    `size_bytes` is the full size: of the reduced, broadcast or gathered tensor, or of all that a rank scatters,
    exchanges or sends."""

    operation: str
    """The requested operation."""
    executed_as: str
    """The executed operation."""
    group: tuple[int, ...]
    """Global ranks of the group."""
    size_bytes: int
    start: float
    """Time by time.perf_counter()."""
    end: float | None = None
    """None if unknown.

    Gloo does not report the end of send and recv. NCCL does not report it for a batch of them, nor for functional
    collectives."""
    group_name: str = ""
    """PyTorch's name of the group: several groups may have the same ranks."""

    @property
    def ranks(self) -> int:
        """The number of ranks that take part."""
        return len(self.group)

    @property
    def sent_bytes(self) -> float:
        """The number of bytes that a rank sends with a ring algorithm; 0 for a receive."""
        if self.operation in POINT_TO_POINT:
            return self.size_bytes if self.operation == "send" else 0
        return sent_bytes(cast(collectives.Collective, self.operation), self.size_bytes, self.ranks)

    def exposed_seconds(self, waits: Sequence[tuple[float, float]]) -> float:
        """Return the seconds of the call in which the rank waited; `waits` are in chronological order."""
        total = 0.0
        for wait_start, wait_end in islice(waits, bisect_right(waits, self.start, key=itemgetter(1)), None):
            if self.end is None or wait_start >= self.end:
                break
            total += min(self.end, wait_end) - max(self.start, wait_start)
        return total


@dataclass
class _DeviceSpan:
    """The span of a call on a GPU, in events of its streams."""

    call: CollectiveCall
    start: Timestamp
    end: Timestamp | None = None


class CollectiveRecorder(TorchDispatchMode):
    """Recorder of the collectives issued inside, including those of DDP and FSDP.

    It slows every operation, so it is for one or two steps."""

    def __init__(
        self, requested_operation: Callable[[], str | None] = lambda: None, clock: DeviceClock = HOST_CLOCK
    ) -> None:
        """Create the recorder.

        `requested_operation` returns the operation that the current one implements, if any. `clock` is that of the
        device: with the host's, collectives on a GPU have no end."""
        super().__init__()
        self.requested_operation = requested_operation
        self.clock = clock
        self.calls: list[CollectiveCall] = []
        self._device_spans: list[_DeviceSpan] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        operation = OPERATION_NAMES.get(func._schema.name.partition("::")[2]) if func.namespace in NAMESPACES else None
        if operation is None:
            return func(*args, **(kwargs or {}))
        requested = self.requested_operation() or operation
        on_gpu = any(leaf.is_cuda for leaf in tree_leaves(args) if isinstance(leaf, Tensor))
        event = self.clock.record() if on_gpu else None
        started_at = time.perf_counter()
        out = func(*args, **(kwargs or {}))
        name = _group_name(args)
        ranks = ranks_of_group(name) if name else tuple(range(dist.get_world_size()))
        call = CollectiveCall(
            operation=requested,
            executed_as=operation,
            group=ranks,
            size_bytes=_total_bytes(operation, args),
            start=started_at,
            group_name=name,
        )
        self.calls.append(call)
        if not on_gpu:
            _record_end(call, out)
        elif self.clock.device.type == "cuda":
            self._record_device_end(_DeviceSpan(call, event), out, func.namespace)
        return out

    def _record_device_end(self, span: _DeviceSpan, out: Any, namespace: str) -> None:
        """Record an event at the end of a call on NCCL's stream.

        A call that returns work runs on a stream of NCCL, which is not accessible. Its future is complete as soon as
        the call is queued, and then runs callbacks under a stream that waits for NCCL's. A blocking collective returns
        no work and runs on the current stream. A send or a receive without work belongs to a batch, which is queued
        later."""
        works = _find_work_handles(out)
        if works:
            works[0].get_future().add_done_callback(lambda _: setattr(span, "end", self.clock.record()))
        elif namespace == "c10d" and span.call.executed_as not in POINT_TO_POINT:
            span.end = self.clock.record()
        self._device_spans.append(span)

    def resolve_device_times(self) -> None:
        """Set the start and end of calls on a GPU, after their step."""
        spans = [span for span in self._device_spans if span.end is not None]
        times = self.clock.resolve([event for span in spans for event in (span.start, span.end)])
        for span, start, end in zip(spans, times[::2], times[1::2], strict=True):
            span.call.start = start
            span.call.end = end
        exclude_queueing([span.call for span in spans])
        self._device_spans.clear()


def exclude_queueing(calls: Sequence[CollectiveCall]) -> None:
    """Set the start of each collective to the end of the previous one of its group, or later.

    NCCL runs the collectives of a group one by one, and a stream reaches a call long before the call runs. Messages
    between two ranks have a separate communicator per pair."""
    ends: dict[str, float] = {}
    for call in calls:
        if call.operation not in POINT_TO_POINT and call.end is not None:
            call.start = min(max(call.start, ends.get(call.group_name, call.start)), call.end)
            ends[call.group_name] = call.end


def _group_name(args: Sequence[Any]) -> str:
    """Return the name of the process group among the arguments of an operation, or ""."""
    for argument in args:
        if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
            return dist.ProcessGroup.unbox(argument).group_name
        if isinstance(argument, str):  # functional collectives name their group
            with suppress(LookupError, RuntimeError, ValueError):
                ranks_of_group(argument)
                return argument
    return ""


def ranks_of_group(name: str) -> tuple[int, ...]:
    """Return the global ranks of a process group."""
    # PyTorch knows the ranks of its own group object only, not of another object for the group.
    return tuple(dist.get_process_group_ranks(c10d._resolve_process_group(name)))  # type: ignore[arg-type, attr-defined]


def _total_bytes(operation: str, args: Sequence[Any]) -> int:
    sizes = [sum(leaf.nbytes for leaf in tree_leaves(argument) if isinstance(leaf, Tensor)) for argument in args]
    # Where an operation has outputs and inputs, outputs come first. The larger of the two has the full size.
    return sizes[1] if operation == "all_to_all" else max(sizes)


def _record_end(call: CollectiveCall, out: Any) -> None:
    def on_done(_: Any) -> None:
        call.end = time.perf_counter()

    for work in _find_work_handles(out):
        with suppress(RuntimeError):  # gloo has no future for a send or a recv
            work.get_future().add_done_callback(on_done)


def _find_work_handles(out: Any) -> list[dist.Work]:
    """Return the work handles of an operation; a blocking call of NCCL returns none."""
    works = [dist.Work.unbox(leaf) for leaf in tree_leaves(out) if isinstance(leaf, torch.ScriptObject)]
    return [work for work in works if work is not None]

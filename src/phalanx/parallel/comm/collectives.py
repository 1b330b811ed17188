"""The collectives of all sharded strategies: gather one tensor, reduce-scatter one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.parallel.comm.wait_timer import WaitTimer

# Collectives of one tensor; torch 2.13 renamed both.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


REQUESTED_OPERATION: ContextVar[str | None] = ContextVar("requested_operation", default=None)
"""The operation that the current call implements, for recorders of operations."""


@contextmanager
def recorded_as(operation: str) -> Iterator[None]:
    """Record the calls inside as `operation`, which they implement."""
    token = REQUESTED_OPERATION.set(operation)
    try:
        yield
    finally:
        REQUESTED_OPERATION.reset(token)


def sends_gpu_tensors(group: dist.ProcessGroup | None) -> bool:
    """Return whether NCCL is a backend of a group. A mesh's group with NCCL has no other backend."""
    return "nccl" in dist.get_backend_config(group)


def to_group_device(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Move an offloaded tensor to the GPU if `group` sends GPU tensors."""
    return tensor.cuda() if sends_gpu_tensors(group) else tensor


def start_all_reduce(
    tensors: Sequence[Tensor], group: dist.ProcessGroup | None, comm_wait: WaitTimer
) -> Callable[[], None]:
    """Start to sum tensors of one dtype and device over the ranks by one all-reduce.

    The returned function finishes the all-reduce and writes the sums into the tensors."""
    flat = to_group_device(torch.cat([tensor.flatten() for tensor in tensors]), group)
    work = dist.all_reduce(flat, group=group, async_op=True)

    def finish() -> None:
        with comm_wait.measure():
            work.wait()
        totals = flat.to(tensors[0].device).split([tensor.numel() for tensor in tensors])
        for tensor, total in zip(tensors, totals, strict=True):
            tensor.copy_(total.view_as(tensor))

    return finish


class ReduceScatter:
    """A reduce-scatter that runs from its construction to `wait`.

    Gloo has no reduce-scatter (PyTorch implements it by an all-reduce). On gloo it is an all-to-all and a local sum, 2
    to 3.5 times as fast. In bf16 NCCL uses the same method, because its ring would round the sum at every rank. The
    number of bytes is equal."""

    def __init__(self, sent: Tensor, out: Tensor, group: dist.ProcessGroup, comm_wait: WaitTimer) -> None:
        """Start to send `sent` [N x n], a part for each of N ranks; `out` [n] receives this rank's sum."""
        self.sent = sent
        self.out = out
        self.comm_wait = comm_wait
        self.received: Tensor | None = None
        if sent.device.type == "cpu" or sent.dtype == torch.bfloat16:
            self.received = torch.empty_like(sent)
            with recorded_as("reduce_scatter"):
                self.work = dist.all_to_all_single(self.received, sent, group=group, async_op=True)
        else:
            self.work = reduce_scatter(out, sent, group=group, async_op=True)

    def wait(self) -> None:
        """Wait for the reduction, after which `out` holds the sum."""
        with self.comm_wait.measure():
            self.work.wait()
        if self.received is not None:
            total = self.received.view(-1, self.out.numel())
            torch.sum(total, dim=0, out=self.out.view(-1))  # PyTorch adds bf16 in fp32, and rounds once

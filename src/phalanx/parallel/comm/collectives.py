"""The collectives that every sharded strategy uses: gather one tensor, reduce-scatter one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.parallel.comm.wait_timer import WaitTimer

# Of one tensor each; torch 2.13 renamed both.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


REQUESTED_OPERATION: ContextVar[str | None] = ContextVar("asked_for", default=None)
"""What an operation stands for while it is called, for whoever records operations."""


@contextmanager
def recorded_as(operation: str) -> Iterator[None]:
    """Around the call of an operation that does the work of another."""
    token = REQUESTED_OPERATION.set(operation)
    try:
        yield
    finally:
        REQUESTED_OPERATION.reset(token)


def start_all_reduce(
    tensors: Sequence[Tensor], group: dist.ProcessGroup | None, exposed: WaitTimer
) -> Callable[[], None]:
    """Starts to sum each of these tensors, of one dtype, over the ranks by one all-reduce; what it returns ends it, and
    writes the sums into them."""
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    work = dist.all_reduce(flat, group=group, async_op=True)

    def finish() -> None:
        with exposed.measure():
            work.wait()
        for tensor, total in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(total.view_as(tensor))

    return finish


class ReduceScatter:
    """Rank r's part, summed over ranks, of what each rank sends: under way from the construction to `wait`.

    Gloo has no reduce-scatter (PyTorch makes it of an all-reduce); there it is an all-to-all and a local sum, 2 to 3.5
    times as fast. In bf16 it is so on NCCL, too, whose ring would round the sum at every rank: the bytes are the same.
    """

    def __init__(self, sent: Tensor, out: Tensor, group: dist.ProcessGroup, exposed: WaitTimer) -> None:
        """`sent` [N x n] holds a part for each of the N ranks, `out` [n] takes this rank's."""
        self.sent, self.out, self.exposed = sent, out, exposed
        self.received: Tensor | None = None
        if sent.device.type == "cpu" or sent.dtype == torch.bfloat16:
            self.received = torch.empty_like(sent)
            with recorded_as("reduce_scatter"):
                self.work = dist.all_to_all_single(self.received, sent, group=group, async_op=True)
        else:
            self.work = reduce_scatter(out, sent, group=group, async_op=True)

    def wait(self) -> None:
        """End it: `out` has the sum."""
        with self.exposed.measure():
            self.work.wait()
        if self.received is not None:
            total = self.received.view(-1, self.out.numel())
            if self.out.dtype == torch.bfloat16:  # rounded once, not at every rank
                self.out.view(-1).copy_(total.sum(dim=0, dtype=torch.float32))
            else:
                torch.sum(total, dim=0, out=self.out.view(-1))

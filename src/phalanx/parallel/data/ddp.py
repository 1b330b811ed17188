"""Data parallelism (DDP): every rank holds the whole model, reads its own share of the batch, and gradients are summed.

Gradients are all-reduced in buckets while the backward pass goes on (PyTorch Distributed, arXiv 2006.15704)."""

import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from phalanx.parallel.comm.collectives import start_all_reduce
from phalanx.parallel.grad_norm import scale_gradients
from phalanx.parallel.module_tensors import CHECKPOINT_WRAPPER_PREFIX
from phalanx.parallel.strategy import Strategy
from phalanx.spec.chunks import chunk_by_bytes
from phalanx.spec.layout import Layout

MAX_INT = 2**31 - 1
POWERSGD_FROM_STEP = 10
"""PowerSGD sends whole gradients before: the first ones change most, and DDP settles its buckets (arXiv 1905.13727)."""


class OverlappingReplica(Strategy):
    """Data parallelism without DDP, which follows one micro-batch at a time: gradients are summed in `collect`, for
    those whose micro-batches overlap (a pipeline)."""

    def __init__(
        self, module: nn.Module, layout: Layout, group: dist.ProcessGroup, excluded: frozenset[str] = frozenset()
    ) -> None:
        """`excluded` are parameters whose gradients these ranks do not sum."""
        super().__init__(module, group)
        self.excluded_names = excluded
        self.bucket_bytes = int(layout.bucket_mb * 2**20)

    def finalize_gradients(self) -> None:
        for parameter in self.trainable_parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [gradient for name, gradient in self.gradients().items() if name not in self.excluded_names]
        buckets = chunk_by_bytes(gradients, self.bucket_bytes)
        for finish in [start_all_reduce(bucket, self.group, self.comm_wait) for bucket in buckets]:
            finish()


class DDP(Strategy):
    """A replica of the model. DDP divides summed gradients by the ranks; the trainer divides the loss by the tokens
    of the global batch, so `loss_scale` takes DDP's division back."""

    model: DistributedDataParallel

    def __init__(
        self, module: nn.Module, layout: Layout, group: dist.ProcessGroup, excluded: frozenset[str] = frozenset()
    ) -> None:
        """`excluded` are parameters whose gradients these ranks do not sum."""
        super().__init__(module, group)
        self.loss_scale = float(group.size())
        self.excluded_names = excluded
        self.finds_unused_parameters = layout.ddp_find_unused_parameters
        # The routers' buffers are kept equal by summing their loads; DDP need not broadcast them at every forward pass.
        ignored = [name for name, _ in module.named_buffers()]
        ignored += [
            name for name, _ in module.named_parameters() if name.replace(CHECKPOINT_WRAPPER_PREFIX, "") in excluded
        ]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ignored)
        self.model = DistributedDataParallel(
            module,
            process_group=group,
            static_graph=layout.ddp_static_graph,
            find_unused_parameters=layout.ddp_find_unused_parameters,
            gradient_as_bucket_view=True,
            init_sync=False,  # initial weights are a function of their names
            **_bucket_options(layout),
        )
        # DDP times itself in its first 10 steps and then in every 100th, where the host waits 8 times for the device.
        self.model._set_ddp_runtime_logging_sample_rate(MAX_INT)
        self._powersgd: PowerSGDState | None = None
        if layout.gradient_compression == "bf16":
            self.model.register_comm_hook(group, bf16_allreduce_hook)
        elif layout.gradient_compression == "powersgd":
            self._powersgd = PowerSGDState(group, layout.powersgd_rank, POWERSGD_FROM_STEP)
            self.model.register_comm_hook(self._powersgd, powerSGD_hook)
        self._last_gradient_time = 0.0
        # Weak: autograd keeps the hooks of a parameter alive, and this would keep the group of ranks with it.
        ready = partial(DDP._record_gradient_time, weakref.proxy(self))
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(ready)

    def _record_gradient_time(self, _: Tensor) -> None:
        self._last_gradient_time = time.perf_counter()

    @contextmanager
    def backward(self, last: bool) -> Iterator[None]:
        """Around the forward and backward pass of a micro-batch; only the `last` one of a step communicates."""
        if not last:
            with self.model.no_sync():
                yield
            return
        yield
        # On the CPU, backward returns when the last bucket is reduced: what follows the last gradient is exposed.
        if next(self.model.parameters()).device.type == "cpu":
            now = time.perf_counter()
            self.comm_wait.add(min(now, self._last_gradient_time), now)

    def reduce_partial_gradients(self) -> None:
        """As everywhere; DDP did not divide those that are apart."""
        excluded_gradients = [gradient for name, gradient in self.gradients().items() if name in self.excluded_names]
        device = next(self.module.parameters()).device
        scale_gradients(excluded_gradients, torch.full((), 1 / self.loss_scale, dtype=torch.float64, device=device))
        super().reduce_partial_gradients()

    def zero_grad(self) -> None:
        """Set them to zero where they lie, in the buckets that DDP keeps: dropped, the micro-batches before the last
        would make a second set of them. A part that a step may leave unused must have none."""
        self.module.zero_grad(set_to_none=self.finds_unused_parameters)

    def resident_tensors(self, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, list[Tensor]]:
        """As everywhere, and what PowerSGD did not send yet."""
        unsent = self._powersgd.error_dict.values() if self._powersgd else ()
        return super().resident_tensors(optimizers) | {"communication": list(unsent)}

    def join(self) -> AbstractContextManager[None]:
        """Around the last steps of a run, of which ranks have different numbers: those that are done shadow the others'
        collectives with zeros (DDP's own join), and get their weights at the end.

        Inside it `update` follows `backward`: who is done takes no part in `reduce`. The state of optimizers is not
        sent, so those who were done early must not train on with theirs."""
        # The default divides by all ranks, gone or not, and `loss_scale` takes just that back: gradients stay sums.
        return self.model.join()


def _bucket_options(layout: Layout) -> dict[str, Any]:
    """DDP's options for the size of buckets, in MiB."""
    if layout.first_bucket_mb is None:
        return {"bucket_cap_mb": layout.bucket_mb}
    return {"bucket_cap_mb_list": [layout.first_bucket_mb, layout.bucket_mb]}


# DDP compares the types as objects, so that this file does not postpone annotations.
def bf16_allreduce_hook(group: dist.ProcessGroup, bucket: GradBucket) -> Future[Tensor]:
    """Half the bytes of fp32 on the wire. (PyTorch's own hook of this kind is refused by name without NCCL.)"""
    buffer = bucket.buffer()
    compressed = buffer.to(torch.bfloat16).div_(group.size())
    work = dist.all_reduce(compressed, group=group, async_op=True)
    return work.get_future().then(lambda done: buffer.copy_(done.value()[0]))

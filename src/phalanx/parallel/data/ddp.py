"""Data parallelism (DDP): every rank has the full model and a share of the batch.

Gradients are summed over ranks: all-reduced in buckets during the backward pass (PyTorch Distributed, arXiv
2006.15704)."""

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
from phalanx.parallel.cross_entropy import LossScale
from phalanx.parallel.grad_norm import scale_gradients
from phalanx.parallel.module_tensors import CHECKPOINT_WRAPPER_PREFIX
from phalanx.parallel.strategy import Strategy
from phalanx.program.buckets import pipeline_gradient_buckets
from phalanx.spec.layout import Layout

MAX_INT = 2**31 - 1
POWERSGD_FROM_STEP = 10
"""Step from which PowerSGD compresses gradients.

The first gradients change most, and DDP rebuilds its buckets during these steps (arXiv 1905.13727)."""


class OverlappingReplica(Strategy):
    """Data parallelism without DDP, for overlapping micro-batches (a pipeline).

    DDP supports one micro-batch at a time. Here `finalize_gradients` sums the gradients."""

    def __init__(
        self, module: nn.Module, layout: Layout, group: dist.ProcessGroup, excluded: frozenset[str] = frozenset()
    ) -> None:
        """Create a replica; `excluded` names parameters whose gradients these ranks do not sum."""
        super().__init__(module, group)
        self.excluded_names = excluded
        self.layout = layout

    def finalize_gradients(self) -> None:
        """All-reduce the gradients of the step in buckets."""
        for parameter in self.trainable_parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [gradient for name, gradient in self.gradients().items() if name not in self.excluded_names]
        buckets = pipeline_gradient_buckets(gradients, self.layout)
        for finish in [start_all_reduce(bucket, self.group, self.comm_wait) for bucket in buckets]:
            finish()


class DDP(Strategy):
    """A replica of the model under PyTorch's DDP.

    DDP divides summed gradients by the number of ranks. The trainer divides the loss by the tokens of the global batch,
    so `loss_scale` cancels DDP's division."""

    model: DistributedDataParallel

    def __init__(
        self, module: nn.Module, layout: Layout, group: dist.ProcessGroup, excluded: frozenset[str] = frozenset()
    ) -> None:
        """Create a replica; `excluded` names parameters whose gradients these ranks do not sum."""
        super().__init__(module, group)
        self.backward_scale = LossScale(float(group.size()))
        self.excluded_names = excluded
        self.finds_unused_parameters = layout.ddp_find_unused_parameters
        # The routers' buffers are kept equal by summing their loads; DDP need not broadcast them at every forward pass.
        ignored = [name for name, _ in module.named_buffers()]
        names = (name for name, _ in module.named_parameters())
        ignored += [name for name in names if name.replace(CHECKPOINT_WRAPPER_PREFIX, "") in excluded]
        bucket_options: dict[str, Any] = {"bucket_cap_mb": layout.bucket_mb}
        if layout.first_bucket_mb is not None:
            bucket_options = {"bucket_cap_mb_list": [layout.first_bucket_mb, layout.bucket_mb]}
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ignored)
        self.model = DistributedDataParallel(
            module,
            process_group=group,
            static_graph=layout.ddp_static_graph,
            find_unused_parameters=layout.ddp_find_unused_parameters,
            gradient_as_bucket_view=True,
            init_sync=False,  # initial weights are a function of their names
            **bucket_options,
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
        # Weak: autograd keeps the hooks of a parameter alive, and a strong reference would keep the group alive.
        ready = partial(DDP._record_gradient_time, weakref.proxy(self))
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(ready)

    def _record_gradient_time(self, _: Tensor) -> None:
        self._last_gradient_time = time.perf_counter()

    @contextmanager
    def accumulate(self, last: bool = True) -> Iterator[None]:
        """Wrap the forward and backward pass of a micro-batch; only the `last` one of a step communicates."""
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
        """Reduce as `Strategy` does, after dividing the excluded gradients, which DDP did not divide."""
        excluded_gradients = [gradient for name, gradient in self.gradients().items() if name in self.excluded_names]
        device = next(self.module.parameters()).device
        scale_gradients(excluded_gradients, torch.full((), 1 / self.loss_scale, dtype=torch.float64, device=device))
        super().reduce_partial_gradients()

    def zero_grad(self) -> None:
        """Set the gradients to zero in the buckets that DDP keeps.

        If they were dropped, the micro-batches before the last would allocate a second set. A module that a step may
        leave unused must have no gradients."""
        self.module.zero_grad(set_to_none=self.finds_unused_parameters)

    def resident_tensors(self, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, list[Tensor]]:
        """Return the persistent tensors of this rank by part, with the unsent error of PowerSGD."""
        unsent = self._powersgd.error_dict.values() if self._powersgd else ()
        return super().resident_tensors(optimizers) | {"communication": list(unsent)}

    def join(self) -> AbstractContextManager[None]:
        """Return the context manager for ranks with different numbers of steps (`torch` Join).

        Ranks without batches participate in collectives with zeros, and receive the final weights on exit. Inside it
        `update` follows `accumulate`: a finished rank takes no part in `reduce`. Optimizer state is not sent: a
        rank that finished early must not continue training with its state."""
        # The default divides by all ranks, finished or not, and `loss_scale` cancels it: gradients stay sums.
        return self.model.join()


# DDP compares the types as objects, so this file does not postpone annotations.
def bf16_allreduce_hook(group: dist.ProcessGroup, bucket: GradBucket) -> Future[Tensor]:
    """All-reduce a bucket in bf16: half the bytes of fp32.

    (Without NCCL, DDP rejects PyTorch's own hook of this kind by its name.)"""
    buffer = bucket.buffer()
    compressed = buffer.to(torch.bfloat16).div_(group.size())
    work = dist.all_reduce(compressed, group=group, async_op=True)
    return work.get_future().then(lambda done: buffer.copy_(done.value()[0]))

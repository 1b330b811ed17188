"""ZeRO-3 (arXiv 1910.02054) by PyTorch's FSDP2: parameters, gradients and optimizer state are split over ranks; each
block's parameters are gathered just before use, and its gradients reduce-scattered just after. HSDP splits within
groups of ranks and replicates between them.

On gloo FSDP2 gathers synchronously and reduces twice what it needs (its reduce-scatter is an all-reduce); here gathers
run ahead of the blocks that need them, and a reduce-scatter is an all-to-all and a local sum, ended one block later."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from phalanx.model.transformer import Transformer
from phalanx.parallel.exposed import ExposedTime, TimedWork


class ZeRO3:
    """A sharded model. Gradients are summed over ranks, not averaged: the trainer divides the loss."""

    loss_scale = 1.0

    def __init__(self, model: Transformer, mesh: DeviceMesh, compute_dtype: torch.dtype | None) -> None:
        """`mesh` is one-dimensional (ZeRO-3) or replicate x shard (HSDP); `compute_dtype` casts parameters when they
        are gathered, while gradients are reduced and state is kept in the parameters' own dtype."""
        self.exposed = ExposedTime()
        self.model = model
        policy = MixedPrecisionPolicy(
            param_dtype=compute_dtype,
            reduce_dtype=torch.float32 if compute_dtype else None,
            cast_forward_inputs=False,  # rotary tables stay fp32
        )
        blocks = [fully_shard(block, mesh=mesh, mp_policy=policy) for block in model.blocks]
        self.root = fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        self.units: list[FSDPModule] = [self.root, *blocks]
        for unit in self.units:
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
        self.reduce_scatter: GlooReduceScatter | None = None
        if mesh.device_type == "cpu":
            self._overlap_on_gloo(replicated=mesh.ndim > 1)

    def _overlap_on_gloo(self, replicated: bool) -> None:
        self.reduce_scatter = GlooReduceScatter(self.exposed, deferred=not replicated)
        for unit, following in zip(self.units, [*self.units[1:], None], strict=True):
            unit._set_unshard_async_op(True)
            unit.set_custom_all_gather(TimedAllGather(self.exposed))
            unit.set_custom_reduce_scatter(self.reduce_scatter)
            if following is not None:
                unit.set_modules_to_forward_prefetch([following])

    @contextmanager
    def backward(self, last: bool) -> Iterator[None]:
        """Around the forward and backward pass of a micro-batch; only the `last` of a step communicates gradients."""
        self.root.set_requires_gradient_sync(last)
        self.root.set_is_last_backward(last)
        yield
        if last and self.reduce_scatter is not None:
            self.reduce_scatter.finish()

    def rest(self) -> None:
        """Split the parameters again that a forward pass without a backward pass left gathered."""
        for unit in self.units:
            unit.reshard()


class TimedAllGather(DefaultAllGather):
    """PyTorch's all-gather, with the time spent waiting for it counted."""

    def __init__(self, exposed: ExposedTime) -> None:
        self.exposed = exposed

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        work = super().__call__(output_tensor, input_tensor, group, async_op)
        return TimedWork(work, self.exposed) if work is not None else None


class GlooReduceScatter(DefaultReduceScatter):
    """All-to-all, then a local sum: 2 to 3.5 times as fast as gloo's, which all-reduces.

    Deferred, the sum waits until the next block's reduction starts (or `finish`), so that the exchange runs beside the
    backward pass of one more block; at most one block's buffers are held meanwhile.
    """

    def __init__(self, exposed: ExposedTime, deferred: bool) -> None:
        self.exposed, self.deferred = exposed, deferred
        self._pending: tuple[dist.Work, Tensor, Tensor, Tensor] | None = None

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: object, async_op: bool = False
    ) -> dist.Work:
        self.finish()
        received = torch.empty_like(input_tensor)
        work = dist.all_to_all_single(received, input_tensor, group=group, async_op=True)
        self._pending = (work, received, input_tensor, output_tensor)
        if not self.deferred:
            self.finish()
        return work

    def finish(self) -> None:
        """Wait for the exchange under way, if any, and sum what came."""
        if self._pending is None:
            return
        work, received, _, output = self._pending
        self._pending = None
        with self.exposed.waiting():
            work.wait()
        torch.sum(received.view(-1, output.numel()), dim=0, out=output.view(-1))

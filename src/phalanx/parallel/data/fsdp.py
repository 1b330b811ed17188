"""ZeRO-3 (arXiv 1910.02054, section 5.3) by PyTorch's FSDP2: parameters, gradients and optimizer state are split over
ranks; a unit's parameters are gathered just before use, and its gradients reduce-scattered just after, at every
micro-batch. HSDP splits within groups of ranks and replicates between them.

On gloo FSDP2 gathers synchronously and reduces twice what it needs (its reduce-scatter is an all-reduce); here gathers
run ahead of the units that need them, and a reduce-scatter is an all-to-all and a local sum, ended one unit later."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from phalanx.parallel.comm.collectives import ReduceScatter
from phalanx.parallel.comm.wait_timer import TimedWork, WaitTimer
from phalanx.parallel.data.offload import CpuOffload
from phalanx.parallel.data.sharding_checks import check_shardable_optimizers
from phalanx.parallel.module_tensors import named_modules, step_parameters
from phalanx.parallel.strategy import Strategy
from phalanx.spec.chunks import chunk_by_bytes
from phalanx.spec.layout import Layout


class FSDP(Strategy):
    """A sharded model. Gradients are summed over ranks, not averaged: the trainer divides the loss."""

    autocast = False

    def __init__(
        self,
        module: nn.Module,
        blocks: Sequence[nn.Module],
        layout: Layout,
        mesh: DeviceMesh,
        compute_dtype: torch.dtype | None,
        offload: CpuOffload | None,
        group: dist.ProcessGroup | None,
        expert_parameters: frozenset[str] = frozenset(),
        expert_mesh: DeviceMesh | None = None,
    ) -> None:
        """`mesh` is one-dimensional (ZeRO-3) or replicate x shard (HSDP); `compute_dtype` casts parameters when they
        are gathered, while gradients are reduced and state is kept in the parameters' own dtype. The parameters
        `expert_parameters` are split over `expert_mesh`."""
        policy = MixedPrecisionPolicy(
            param_dtype=compute_dtype,
            reduce_dtype=torch.float32 if compute_dtype else None,
            cast_forward_inputs=False,  # rotary tables stay fp32
        )
        on_gpu = mesh.device_type != "cpu"
        offload_policy = OffloadPolicy() if offload is None else CPUOffloadPolicy(pin_memory=on_gpu)
        wrapped = [part for block in blocks for part in _fsdp_units(block, layout.fsdp_unit)]
        shard = partial(fully_shard, mp_policy=policy, offload_policy=offload_policy)
        reshard = layout.reshard_after_forward and layout.pp == 1
        for owner in modules_owning(module, expert_parameters):  # from the inside to the outside
            shard(owner, mesh=expert_mesh, reshard_after_forward=reshard)
        for part in wrapped:
            shard(part, mesh=mesh, reshard_after_forward=reshard)
        self.root = shard(module, mesh=mesh, reshard_after_forward=False)
        units = [part for part in module.modules() if isinstance(part, FSDPModule) and part is not self.root]
        super().__init__(module, group)
        self.units: list[FSDPModule] = [self.root, *units]
        for unit in self.units:
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
        # A deferred sum comes when FSDP2 believes that it is there, and must not be cast in between.
        cast = compute_dtype is not None and any(p.dtype != torch.float32 for p in self.trainable_parameters.values())
        self.deferred = mesh.ndim == 1 and not cast
        self.offload = offload
        self.in_pipeline = layout.pp > 1
        self._prefetch(layout.fsdp_prefetch)
        self.reduce_scatter: DeferredReduceScatter | None = None
        if not on_gpu:
            self._install_gloo_collectives()

    def _prefetch(self, depth: int) -> None:
        """Gather `depth` units ahead of the one that computes."""
        backward = [self.root, *reversed(self.units[1:])]
        for index, unit in enumerate(self.units):
            unit.set_modules_to_forward_prefetch(self.units[index + 1 : index + 1 + depth])
        for index, unit in enumerate(backward):
            unit.set_modules_to_backward_prefetch(backward[index + 1 : index + 1 + depth])

    def _install_gloo_collectives(self) -> None:
        self.reduce_scatter = DeferredReduceScatter(self.comm_wait, deferred=self.deferred)
        for unit in self.units:
            unit._set_unshard_async_op(True)
            unit.set_custom_all_gather(TimedAllGather(self.comm_wait))
            unit.set_custom_reduce_scatter(self.reduce_scatter)

    @contextmanager
    def backward(self, last: bool) -> Iterator[None]:
        """Around the forward and backward pass of a micro-batch. Gradients are split after each of them: kept whole
        until the last, they would take as much memory as the model. Replicas sum theirs after the last."""
        if self.in_pipeline:
            self._set_gradient_sync(False)
            yield
            return
        self.root.set_requires_all_reduce(last)
        self.root.set_is_last_backward(last)
        if self.reduce_scatter is None or not self.reduce_scatter.deferred:
            yield
            return
        # FSDP2 would add to gradients whose sum has not come yet: they accumulate here.
        accumulated = {name: p.grad for name, p in self.trainable_parameters.items() if p.grad is not None}
        self.zero_grad()
        yield
        self.reduce_scatter.finish()
        for name, gradient in accumulated.items():
            parameter = self.trainable_parameters[name]
            parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)

    def _set_gradient_sync(self, enabled: bool) -> None:
        """Whether gradients are split, and parameters given back, when a backward pass ends. A pipeline's micro-batches
        overlap, and halves of backward passes go on with parameters that must still be those of the forward pass."""
        self.root.set_requires_gradient_sync(enabled)
        self.root.set_reshard_after_backward(enabled)
        self.root.set_is_last_backward(enabled)

    def finish_weight_grad_pass(self) -> None:
        """FSDP2 adds a pass's gradients up, in the dtype in which it reduces them, when the pass ends. What tells it so
        hangs on the units' inputs and outputs, which this pass did not reach."""
        self.root._get_fsdp_state()._root_post_backward_final_callback()

    def finalize_gradients(self) -> None:
        """What FSDP2 does when a backward pass ends, once for all of a pipeline's step (as PyTorch's own pipelining
        does it, `_PipelineStageBase.perform_reduce_grad`)."""
        self._set_gradient_sync(True)
        state = self.root._get_fsdp_state()
        for unit_state in state._state_ctx.all_states:
            if unit_state._fsdp_param_group is not None:
                unit_state._fsdp_param_group.post_backward()
        state._root_post_backward_final_callback()
        if self.reduce_scatter is not None:
            self.reduce_scatter.finish()

    def step(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Step all at once, or what is offloaded piece by piece."""
        check_shardable_optimizers(optimizers)
        if self.offload is None:
            super().step(optimizers)
            return
        named_pieces = chunk_by_bytes(self.trainable_parameters.items(), self.offload.piece_bytes, self._largest_bytes)
        pieces = [[parameter for _, parameter in piece] for piece in named_pieces]
        gradients = [[parameter.grad for parameter in piece] for piece in pieces]
        self.zero_grad()
        for index, (piece, piece_gradients) in enumerate(zip(pieces, gradients, strict=True)):
            with self.offload.stepping(index, optimizers, piece, gradients=[]):
                step_parameters(optimizers, piece, piece_gradients)

    def _largest_bytes(self, named_parameter: tuple[str, nn.Parameter]) -> int:
        """Return the bytes of the largest share that a rank has of a parameter. By these all ranks cut the same pieces,
        which matters to an optimizer that communicates."""
        name, parameter = named_parameter
        shape = parameter.shape if self.shared is None else self.shared.largest_shape(name)
        return shape.numel() * parameter.element_size()

    def init_optimizer_state(self, parameter: nn.Parameter) -> Tensor:
        return self.offload.zeros_like(parameter) if self.offload else super().init_optimizer_state(parameter)

    def resident_tensors(self, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, list[Tensor]]:
        resident = super().resident_tensors(optimizers)
        resident["parameters"] = list(
            self.trainable_parameters.values()
        )  # whole ones are gathered, which `elastic` counts
        return (
            resident
            if self.offload is None
            else {"offloaded": [tensor for part in resident.values() for tensor in part]}
        )

    def resizable_buffers(self) -> list[Tensor]:
        groups = [unit._get_fsdp_state()._fsdp_param_group for unit in self.units]
        parameters = [parameter for group in groups if group is not None for parameter in group.fsdp_params]
        return [buffer for parameter in parameters for buffer in getattr(parameter, "all_gather_outputs", [])]

    def reshard_parameters(self) -> None:
        """Split the parameters again that a forward pass without a backward pass left gathered."""
        for unit in self.units:
            unit.reshard()


def modules_owning(module: nn.Module, names: frozenset[str]) -> list[nn.Module]:
    """The modules whose own parameters these are."""
    owners = {name.rpartition(".")[0] for name in names}
    return [part for name, part in named_modules(module) if name in owners]


def _fsdp_units(block: nn.Module, wrap: str) -> list[nn.Module]:
    """What is gathered at once of a block: all of it, its parts, or nothing of its own (the whole model at once)."""
    parts = [child for child in block.children() if any(True for _ in child.parameters())]
    return {"model": [], "block": [block], "sublayer": parts}[wrap]


class TimedAllGather(DefaultAllGather):
    """PyTorch's all-gather, with the time spent waiting for it counted."""

    def __init__(self, exposed: WaitTimer) -> None:
        self.exposed = exposed

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        work = super().__call__(output_tensor, input_tensor, group, async_op)
        return TimedWork(work, self.exposed) if work is not None else None


class DeferredReduceScatter(DefaultReduceScatter):
    """Our reduce-scatter in FSDP2's place for it.

    Deferred, the sum waits until the next unit's reduction starts (or `finish`), so that the exchange runs beside the
    backward pass of one more unit; at most one unit's buffers are held meanwhile.
    """

    def __init__(self, exposed: WaitTimer, deferred: bool) -> None:
        self.exposed = exposed
        self.deferred = deferred
        self._pending: ReduceScatter | None = None

    def __call__(  # type: ignore[override]  # FSDP2 drops what comes back
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: object, async_op: bool = False
    ) -> None:
        self.finish()
        self._pending = ReduceScatter(input_tensor, output_tensor, group, exposed=self.exposed)
        if not self.deferred:
            self.finish()

    def finish(self) -> None:
        """End the exchange under way, if any."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None

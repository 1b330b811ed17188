"""ZeRO-3 (arXiv 1910.02054, section 5.3) and HSDP with PyTorch's FSDP2.

Parameters, gradients and optimizer state are sharded over ranks. A unit's parameters are gathered just before use, and
its gradients reduce-scattered just after, at every micro-batch. HSDP shards within groups of ranks and replicates
between groups.

On gloo FSDP2 gathers synchronously and reduces twice the necessary bytes (its reduce-scatter is an all-reduce). Here
gathers run ahead of the units that need them. A reduce-scatter is an all-to-all and a local sum, finished one unit
later.

Why: `docs/design/decisions/fsdp-on-gloo.md`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.distributed.tensor import Shard

from phalanx.model.transformer import Transformer
from phalanx.parallel.comm.collectives import ReduceScatter
from phalanx.parallel.comm.wait_timer import TimedWork, WaitTimer
from phalanx.parallel.data.offload import CpuOffload
from phalanx.parallel.data.sharding_checks import check_shardable_optimizers
from phalanx.parallel.module_tensors import named_modules, step_parameters
from phalanx.parallel.strategy import Strategy
from phalanx.program.buckets import PIECE_BYTES, chunk_by_bytes
from phalanx.program.fsdp_units import (
    EMBEDDING,
    HEAD,
    ROOT,
    backward_order,
    backward_prefetches,
    expert_unit_name,
    forward_prefetches,
    outer_unit_name,
)
from phalanx.spec.layout import Layout
from phalanx.spec.tensor_sharding import data_parallel_axis


class FSDP(Strategy):
    """A sharded model. Gradients are summed over ranks and not averaged, because the trainer divides the loss."""

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
        """Shard a module into FSDP2 units, of which each block is one.

        The mesh is one-dimensional (ZeRO-3), or replicate x shard (HSDP). Gathered parameters have `compute_dtype`, and
        frozen ones always; gradients are reduced and state is stored in the parameters' own dtype. The trainer sums its
        scalars over `group`. `expert_parameters` are sharded over `expert_mesh`, the ranks with the same experts."""
        # Nothing updates frozen parameters, so they need no more digits than products read.
        for parameter in module.parameters() if compute_dtype else ():
            if not parameter.requires_grad and parameter.is_floating_point():
                parameter.data = parameter.data.to(compute_dtype)
        policy = MixedPrecisionPolicy(
            param_dtype=compute_dtype,
            reduce_dtype=torch.float32 if compute_dtype else None,
            cast_forward_inputs=False,  # rotary tables stay fp32
        )
        on_gpu = mesh.device_type != "cpu"
        offload_policy = OffloadPolicy() if offload is None else CPUOffloadPolicy(pin_memory=on_gpu)
        unit_modules = [
            unit_module for block in blocks for unit_module in _select_unit_modules(block, layout.fsdp_unit)
        ]
        shard_unit = partial(fully_shard, mp_policy=policy, offload_policy=offload_policy)
        reshard = layout.reshard_after_forward and layout.pp == 1
        experts = modules_owning(module, expert_parameters)
        # Experts first: FSDP2 requires inner units before outer ones.
        for owner in experts:
            assert expert_mesh is not None
            shard_unit(
                owner,
                mesh=expert_mesh,
                shard_placement_fn=_choose_shard_placement(expert_mesh),
                reshard_after_forward=reshard,
            )
        shard = partial(shard_unit, mesh=mesh, shard_placement_fn=_choose_shard_placement(mesh))
        for unit_module in unit_modules:
            shard(unit_module, reshard_after_forward=reshard)
        if isinstance(module, Transformer):
            _shard_outside_blocks(module, layout, shard, reshard)
        self.root = shard(module, reshard_after_forward=False)
        super().__init__(module, group)
        self.autocast = False
        self.units = _list_units_in_forward_order(module)
        # FSDP2 would copy gradients that it does not send, to divide them.
        unsent = cast("list[FSDPModule]", experts) if expert_mesh is not None and expert_mesh.size() == 1 else []
        for unit in self.units:
            if unit not in unsent:
                unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
        # A deferred sum completes after FSDP2 assumes that it is complete, and must not be cast in between.
        all_fp32 = all(p.dtype == torch.float32 for p in self.trainable_parameters.values())
        casts_sums = compute_dtype is not None and not all_fp32
        self.deferred = mesh.ndim == 1 and not casts_sums
        self.offload = offload
        self.piece_bytes = PIECE_BYTES[layout.offload]
        self.in_pipeline = layout.pp > 1
        inner = [] if layout.fsdp_unit == "model" else experts
        num_forward_only = module.num_forward_only_blocks if isinstance(module, Transformer) else 0
        forward_only = {unit for block in blocks[:num_forward_only] for unit in _list_units_in_forward_order(block)}
        self._schedule_prefetches(layout.fsdp_prefetch, cast("list[FSDPModule]", inner), forward_only)
        self.reduce_scatter: DeferredReduceScatter | None = None
        if not on_gpu:  # gloo
            self.reduce_scatter = DeferredReduceScatter(self.comm_wait, self.deferred)
            for unit in self.units:
                unit._set_unshard_async_op(True)
                unit.set_custom_all_gather(TimedAllGather(self.comm_wait))
                unit.set_custom_reduce_scatter(self.reduce_scatter)

    def _schedule_prefetches(
        self, depth: int, inner: Collection[FSDPModule], forward_only: Collection[FSDPModule]
    ) -> None:
        """Gather `depth` units ahead of the current unit; `inner` are the units inside other units.

        Those of blocks without a backward pass, `forward_only`, are not gathered for one.

        A root without parameters prefetches nothing. Its backward hook on the auxiliary loss can run after the head's
        backward pass, and would gather the head again."""
        has_root = self.root._get_fsdp_state()._fsdp_param_group is not None
        forward = self.units if has_root else self.units[1:]
        backward = backward_order([unit for unit in forward if unit not in forward_only], has_root)
        for unit, ahead in zip(forward, forward_prefetches(forward, inner, depth), strict=True):
            unit.set_modules_to_forward_prefetch(ahead)
        for unit, ahead in zip(backward, backward_prefetches(backward, depth), strict=True):
            unit.set_modules_to_backward_prefetch(ahead)
        # Left without a unit to prefetch, FSDP2 would choose the preceding one in its forward order: the previous
        # micro-batch's head.
        backward[-1].set_modules_to_backward_prefetch(backward[-1:])

    @contextmanager
    def accumulate(self, last: bool = True) -> Iterator[None]:
        """Wrap the forward and backward pass of a micro-batch.

        Gradients are sharded after each micro-batch: full gradients until the last would need as much memory as the
        model. Replicas sum their gradients after the last."""
        if self.in_pipeline:
            self._set_gradient_sync(False)
            yield
            return
        self.root.set_requires_all_reduce(last)
        self.root.set_is_last_backward(last)
        if self.reduce_scatter is None or not self.reduce_scatter.deferred:
            yield
            return
        # Gradients accumulate here, because FSDP2 would add to gradients whose sum is still pending.
        accumulated = {name: p.grad for name, p in self.trainable_parameters.items() if p.grad is not None}
        self.zero_grad()
        yield
        self.reduce_scatter.finish()
        for name, gradient in accumulated.items():
            parameter = self.trainable_parameters[name]
            parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)

    def _set_gradient_sync(self, enabled: bool) -> None:
        """Set whether the end of a backward pass shards gradients and parameters.

        A pipeline's micro-batches overlap. Half backward passes continue with parameters that must still be those of
        the forward pass."""
        self.root.set_requires_gradient_sync(enabled)
        self.root.set_reshard_after_backward(enabled)
        self.root.set_is_last_backward(enabled)

    def finish_weight_grad_pass(self) -> None:
        """Accumulate the gradients of a pass of weight gradients, in FSDP2's reduction dtype.

        FSDP2 itself does so at the end of a backward pass, but its hooks are on the inputs and outputs of units, which
        a pass of weight gradients does not reach."""
        self.root._get_fsdp_state()._root_post_backward_final_callback()

    def finalize_gradients(self) -> None:
        """Run FSDP2's work at the end of a backward pass, once for all of a pipeline's step.

        PyTorch's own pipelining does the same (`_PipelineStageBase.perform_reduce_grad`)."""
        self._set_gradient_sync(True)
        state = self.root._get_fsdp_state()
        for unit_state in state._state_ctx.all_states:
            if unit_state._fsdp_param_group is not None:
                unit_state._fsdp_param_group.post_backward()
        state._root_post_backward_final_callback()
        if self.reduce_scatter is not None:
            self.reduce_scatter.finish()

    def update(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Step all parameters at once, or offloaded parameters piece by piece."""
        check_shardable_optimizers(optimizers)
        if self.offload is None:
            super().update(optimizers)
            return
        named_pieces = chunk_by_bytes(self.trainable_parameters.items(), self.piece_bytes, self._largest_shard_bytes)
        pieces = [[parameter for _, parameter in piece] for piece in named_pieces]
        gradients = [[parameter.grad for parameter in piece] for piece in pieces]
        self.zero_grad()
        for index, (piece, piece_gradients) in enumerate(zip(pieces, gradients, strict=True)):
            with self.offload.stepping(index, optimizers, piece, gradients=[]):
                step_parameters(optimizers, piece, piece_gradients)

    def _largest_shard_bytes(self, named_parameter: tuple[str, nn.Parameter]) -> int:
        """Return the bytes of the largest shard of a parameter on any rank.

        With these sizes all ranks form the same pieces, which matters to an optimizer that communicates."""
        name, parameter = named_parameter
        sharding = self.model_parallel.sharding
        shape = parameter.shape if sharding is None else sharding.largest_shape(name)
        return shape.numel() * parameter.element_size()

    def init_optimizer_state(self, parameter: nn.Parameter) -> Tensor:
        """Return zeros like `parameter`, in the offload storage if there is one."""
        return self.offload.zeros_like(parameter) if self.offload else super().init_optimizer_state(parameter)

    def resident_tensors(self, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, list[Tensor]]:
        """Return the persistent tensors of this rank by part."""
        resident = super().resident_tensors(optimizers)
        # Full parameters are gathered buffers, which `all_gather_buffers` returns.
        resident["parameters"] = list(self.stored_parameters.values())
        if self.offload is not None:
            resident = {"offloaded": [tensor for tensors in resident.values() for tensor in tensors], "parameters": []}
        resident["parameters"] += self.carried_tensors
        return resident


def all_gather_buffers(module: nn.Module) -> list[list[Tensor]]:
    """Return the all-gather buffers of each FSDP2 unit; a module without FSDP2 has none.

    The storage of a unit's buffers is freed and reallocated together, behind persistent tensors."""
    groups = [unit._get_fsdp_state()._fsdp_param_group for unit in _list_units_in_forward_order(module)]
    return [
        [buffer for parameter in group.fsdp_params for buffer in getattr(parameter, "all_gather_outputs", [])]
        for group in groups
        if group is not None
    ]


def reshard_parameters(module: nn.Module, keeps_root: bool = False) -> None:
    """Free the parameters that a forward pass without a backward pass has left gathered in FSDP2's units.

    `keeps_root` leaves those of the first unit, the root."""
    for unit in _list_units_in_forward_order(module)[keeps_root:]:
        unit.reshard()


def _choose_shard_placement(mesh: DeviceMesh) -> Callable[[nn.Parameter], Shard]:
    """Return the placement of each parameter on the last axis of a mesh."""
    return lambda parameter: Shard(data_parallel_axis(parameter.shape, mesh.size(-1)))


def _shard_outside_blocks(model: Transformer, layout: Layout, shard: Callable[..., object], reshard: bool) -> None:
    """Make the embeddings one unit, and the final norm and head another, unless the root owns them."""
    modules: dict[str, list[nn.Module]] = {EMBEDDING: [], HEAD: [], ROOT: []}
    reads_ends_twice = model.spec.tie_embeddings or model.spec.per_layer_input_size is not None
    for name, child in model.named_children():
        if child is not model.blocks:
            modules[outer_unit_name(layout, reads_ends_twice, name)].append(child)
    if not modules[EMBEDDING]:
        return
    shard(modules[EMBEDDING], reshard_after_forward=reshard)
    for embedding in modules[EMBEDDING]:
        # The gradients of embeddings need token ids only.
        cast("FSDPModule", embedding).set_unshard_in_backward(False)
    # The head is not resharded between its passes, because its backward pass follows at once.
    shard(modules[HEAD], reshard_after_forward=False)


def _list_units_in_forward_order(root: nn.Module) -> list[FSDPModule]:
    """Return the first module of each FSDP unit, in the order of the forward pass."""
    units: dict[object, FSDPModule] = {}
    for submodule in root.modules():
        if isinstance(submodule, FSDPModule):
            units.setdefault(submodule._get_fsdp_state(), submodule)
    return list(units.values())


def modules_owning(module: nn.Module, names: frozenset[str]) -> list[nn.Module]:
    """Return the modules that own these parameters directly."""
    owners = set(map(expert_unit_name, names))
    return [submodule for name, submodule in named_modules(module) if name in owners]


def _select_unit_modules(block: nn.Module, wrap: str) -> list[nn.Module]:
    """Return the modules of a block that become units: none where the full model is one unit."""
    submodules = [child for child in block.children() if any(True for _ in child.parameters())]
    return {"model": [], "block": [block], "sublayer": submodules}[wrap]


class TimedAllGather(DefaultAllGather):
    """PyTorch's all-gather with a timer of the time spent waiting for it."""

    def __init__(self, comm_wait: WaitTimer) -> None:
        self.comm_wait = comm_wait

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Gather, and return the pending work."""
        work = super().__call__(output_tensor, input_tensor, group, async_op)
        return TimedWork(work, self.comm_wait) if work is not None else None


class DeferredReduceScatter(DefaultReduceScatter):
    """Phalanx's reduce-scatter, in place of FSDP2's.

    If deferred, the sum waits until the next unit's buffers are allocated (or `finish`), so that the exchange overlaps
    the backward pass of one more unit. At most one unit's buffers exist at a time."""

    def __init__(self, comm_wait: WaitTimer, deferred: bool) -> None:
        self.comm_wait = comm_wait
        self.deferred = deferred
        self._pending: ReduceScatter | None = None

    def __call__(  # type: ignore[override]  # FSDP2 ignores the return value
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: object, async_op: bool = False
    ) -> None:
        """Finish the previous exchange, unless `allocate` has, and start the next."""
        self.finish()
        self._pending = ReduceScatter(input_tensor, output_tensor, group, self.comm_wait)
        if not self.deferred:
            self.finish()

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate a buffer of the next exchange, after those of the previous exchange are freed."""
        self.finish()
        return super().allocate(size, dtype=dtype, device=device)

    def finish(self) -> None:
        """Finish the pending exchange, if any."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None

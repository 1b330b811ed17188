"""ZeRO-1 and ZeRO-2 (arXiv 1910.02054, sections 5.1 and 5.2): every rank computes with the whole model, and trains its
rows of it.

A rank owns an N-th of every parameter's rows and the optimizer state for them. Gradients are reduce-scattered in
buckets to the owners of their rows while the backward pass goes on; the owners step; the new rows are gathered.
ZeRO-1 keeps whole gradients and sends them once per step. ZeRO-2 sends them at every micro-batch and keeps its rows.

Bytes per parameter, with Adam: in fp32 the owned rows are part of the model that computes, 4 + 4 + 8/N or
4 + (4 + 8)/N. In bf16 the model and its gradients are bf16, and owners keep fp32 rows beside: 2 + 2 + 12/N or
2 + (2 + 12)/N (section 3.1)."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from phalanx.parallel.comm.collectives import ReduceScatter, all_gather
from phalanx.parallel.comm.wait_timer import WaitTimer
from phalanx.parallel.data.offload import CpuOffload
from phalanx.parallel.data.sharding_checks import check_shardable_optimizers
from phalanx.parallel.dtensor_utils import as_dtensor
from phalanx.parallel.grad_norm import clip_coefficient
from phalanx.parallel.strategy import (
    Strategy,
    chunk_by_bytes,
    materialize,
    named_parameters,
    optimizer_state_tensors,
    step_parameters,
)
from phalanx.spec.layout import Layout

MIB = 2**20
PIECE_BYTES = 256 * MIB
"""Owned rows that are stepped at once: their gradients are cast to the rows' precision just for it."""


class ZeRO(Strategy):
    """Stage 1 or 2. The trained parameters are this rank's rows, as DTensors (whole where there is one rank)."""

    def __init__(
        self,
        module: nn.Module,
        layout: Layout,
        mesh: DeviceMesh | None,
        device: torch.device,
        compute_dtype: torch.dtype | None,
        offload: CpuOffload | None,
        apart: frozenset[str] = frozenset(),
        apart_mesh: DeviceMesh | None = None,
    ) -> None:
        """`mesh` has one axis; None for a single rank. Without `compute_dtype` the model computes as it is. `offload`
        keeps what is trained, and its state, elsewhere. The parameters `apart` are split over another mesh."""
        split, other = RowSharding(mesh), RowSharding(apart_mesh)
        splits = {name: other if name in apart else split for name, _ in named_parameters(module)}
        beside = {}
        if compute_dtype is not None or offload is not None:
            beside = {
                name: _master_copy(splits[name].rows(p), device, offload)
                for name, p in _trainable(named_parameters(module))
            }
        if compute_dtype is not None:
            for parameter in module.parameters():
                parameter.data = parameter.data.to(compute_dtype)
        materialize(module, device)
        super().__init__(module, split.group)
        self.keeps_full_gradients = layout.data_parallel == "zero1"
        self.autocast = compute_dtype is None
        self.offload = offload
        owned = {
            name: OwnedParameter(name, p, splits[name], beside.get(name), offload)
            for name, p in _trainable(self.trainable_parameters.items())
        }
        self.trainable_parameters = {name: part.master for name, part in owned.items()}
        limit = layout.bucket_mb * MIB
        if offload is not None:  # a piece is whole buckets; their bytes are those of all ranks, in a model's precision
            limit = min(limit, offload.piece_bytes * split.ranks / 2)
        self.buckets = [Bucket(parts, parts[0].split, self.comm_wait) for parts in _make_buckets(owned.values(), limit)]
        self._communicates = True
        self._begun = 0
        self._factor: Tensor | None = None
        """What gradients that rest elsewhere still have to be multiplied by."""
        self._gathering: Bucket | None = None
        # Weak: autograd keeps the hooks of a parameter alive, and these would keep the groups of ranks with them.
        for bucket in self.buckets:
            for part in bucket.parts:
                ready = partial(ZeRO._ready, weakref.proxy(self), weakref.proxy(bucket))
                part.parameter.register_post_accumulate_grad_hook(ready)

    @contextmanager
    def backward(self, last: bool) -> Iterator[None]:
        """Around the forward and backward pass of a micro-batch."""
        self._communicates = last or not self.keeps_full_gradients
        self._begun = 0
        for bucket in self.buckets:
            bucket.missing = len(bucket.parts)
        yield
        if self._communicates:
            for bucket in self.buckets:
                bucket.missing = 0  # what had no gradient has none on any rank, or counts as 0
            self._reduce_ready()
            self.buckets[-1].finish_reduce(self.keeps_full_gradients)

    def finalize_gradients(self) -> None:
        with self.backward(last=True):
            pass

    def _ready(self, bucket: Bucket, _: Tensor) -> None:
        bucket.missing -= 1
        if self._communicates and not bucket.missing:
            self._reduce_ready()

    def _reduce_ready(self) -> None:
        """Send the buckets that are complete, in the same order on every rank, one at a time."""
        while self._begun < len(self.buckets) and not self.buckets[self._begun].missing:
            if self._begun:
                self.buckets[self._begun - 1].finish_reduce(self.keeps_full_gradients)
            self.buckets[self._begun].start_reduce(self.keeps_full_gradients)
            self._begun += 1

    def gradients(self) -> dict[str, Tensor]:
        """The summed gradients of the owned rows, in the precision of the model."""
        parts = {part.name: part for bucket in self.buckets for part in bucket.parts}
        got = {name: (part, part.gradient) for name, part in parts.items() if part.gradient is not None}
        return {name: part.split.as_dtensor(gradient, part.parameter) for name, (part, gradient) in got.items()}

    def normalize_and_clip(self, norm: Tensor, weight: Tensor, clip_norm: float) -> Tensor:
        """As everywhere; gradients that rest elsewhere are divided and clipped when the step reads them anyway."""
        if self.offload is None:
            return super().normalize_and_clip(norm, weight, clip_norm)
        norm = norm / weight.to(norm.dtype)
        self._factor = clip_coefficient(norm, clip_norm) / weight.to(norm.dtype)
        return norm

    def step(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Step the owned rows piece by piece, in the order of the forward pass, and gather what they have become."""
        check_shardable_optimizers(optimizers)
        limit = PIECE_BYTES if self.offload is None else self.offload.piece_bytes
        pieces = chunk_by_bytes(self.buckets[::-1], limit)
        for index, piece in enumerate(pieces):
            parts = [part for bucket in piece for part in bucket.parts]
            masters = [part.master for part in parts]
            gradients = [part.gradient for part in parts]
            with self.offload.stepping(index, optimizers, masters, gradients) if self.offload else nullcontext():
                step_parameters(optimizers, masters, [part.master_gradient(self._factor) for part in parts])
            for bucket in piece:
                bucket.drop_gradients()
                self._gather(bucket)
        self._finish_gather()

    def _gather(self, bucket: Bucket) -> None:
        """Begin to gather a bucket, and end the one before: two are under way at a time, not the whole model."""
        bucket.start_gather()
        self._finish_gather()
        self._gathering = bucket

    def _finish_gather(self) -> None:
        if self._gathering is not None:
            self._gathering.finish_gather()
            self._gathering = None

    def zero_grad(self) -> None:
        for bucket in self.buckets:
            bucket.drop_gradients()

    def init_optimizer_state(self, parameter: nn.Parameter) -> Tensor:
        return self.offload.zeros_like(parameter) if self.offload else super().init_optimizer_state(parameter)

    def resident_tensors(self, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, list[Tensor]]:
        parts = [part for bucket in self.buckets for part in bucket.parts]
        beside = [part.rows for part in parts if not part.aliased]
        rows = [part.gradient for part in parts if part.gradient is not None]
        whole = [part.parameter.grad for part in parts if part.parameter.grad is not None]
        held: dict[str, list[Tensor]] = {"parameters": [part.parameter for part in parts]}
        if self.offload is None:
            return held | {"gradients": rows + whole, "optimizer": beside + optimizer_state_tensors(optimizers)}
        return held | {
            "gradients": whole,
            "offloaded": beside + optimizer_state_tensors(optimizers) + ([] if whole else rows),
        }

    def sync_model_weights(self) -> None:
        """Gather every parameter from the owners of its rows."""
        for bucket in self.buckets:
            self._gather(bucket)
        self._finish_gather()


class RowSharding:
    """Which rows of a tensor are this rank's: of N ranks the first own as many as it takes, the last may have fewer."""

    def __init__(self, mesh: DeviceMesh | None) -> None:
        self.mesh = mesh
        self.ranks, self.rank = (mesh.size(), mesh.get_local_rank()) if mesh is not None else (1, 0)

    @property
    def group(self) -> dist.ProcessGroup | None:
        return self.mesh.get_group() if self.mesh is not None else None

    def rows_per_rank(self, whole: Tensor) -> int:
        """Rows per rank."""
        return -(-len(whole) // self.ranks)

    def rows(self, whole: Tensor) -> Tensor:
        """This rank's rows (a view)."""
        each = self.rows_per_rank(whole)
        return whole.detach()[min(self.rank * each, len(whole)) : min((self.rank + 1) * each, len(whole))]

    def as_dtensor(self, rows: Tensor, whole: Tensor) -> Tensor:
        """This rank's rows as part of a tensor like `whole`."""
        return rows if self.mesh is None else as_dtensor(rows, self.mesh, [Shard(0)], whole.shape)


class OwnedParameter:
    """A parameter that computes, and the rows of it that this rank trains."""

    def __init__(
        self, name: str, parameter: nn.Parameter, split: RowSharding, beside: Tensor | None, offload: CpuOffload | None
    ) -> None:
        """`beside` are the rows where they are not those of the parameter itself."""
        self.name, self.parameter, self.split, self.offload = name, parameter, split, offload
        self.matrix = (len(parameter), parameter[0].numel())
        self.size = split.rows_per_rank(parameter) * self.matrix[1]
        """Elements of a rank, with padding."""
        self.aliased = beside is None
        self.rows = split.rows(parameter) if beside is None else beside
        self.master = nn.Parameter(split.as_dtensor(self.rows, parameter))
        self.gradient: Tensor | None = None
        """Of the rows, summed over ranks, in the precision of the model."""
        self._resting: Tensor | None = None

    def accumulate(self, came: Tensor, keep_whole: bool) -> None:
        """Keep what came of the gradient: in the whole one's rows, or added to what came of micro-batches before."""
        whole = self.parameter.grad
        if keep_whole and whole is not None:
            self.gradient = self.split.rows(whole)
            if came is not whole:
                self.gradient.copy_(came)
        elif self.offload is not None:
            if self._resting is None:
                self._resting = self.offload.to_host(came)
            elif self.gradient is None:
                self._resting.copy_(came)
            else:
                self._resting.add_(came.to(self._resting.device))
            self.offload.write_back([self._resting])
            self.gradient, self.parameter.grad = self._resting, None
        else:
            self.gradient = came if self.gradient is None or came is whole else self.gradient.add_(came)

    def master_gradient(self, factor: Tensor | None) -> Tensor | None:
        """The gradient, times a factor, where and as precise as the master is."""
        if self.gradient is None:
            return None
        scaled = (
            self.gradient if factor is None else self.gradient * factor.to(self.gradient.device, self.gradient.dtype)
        )
        return self.split.as_dtensor(scaled.to(self.rows.device, self.rows.dtype), self.parameter)


class Bucket:
    """Parameters whose gradients are sent at once, and whose rows are gathered at once.

    On the way they lie in a buffer [N, n]: for each rank its rows of every parameter, padded where they are fewer.
    """

    def __init__(self, parts: list[OwnedParameter], split: RowSharding, exposed: WaitTimer) -> None:
        self.parts, self.exposed, self.group = parts, exposed, split.group
        self.sizes = [part.size for part in parts]
        self.missing = len(parts)
        """Gradients of the micro-batch under way that have not come yet."""
        self._reducing: ReduceScatter | None = None
        self._gathering: tuple[dist.Work, Tensor] | None = None

    @property
    def nbytes(self) -> int:
        """Of the owned rows, with padding: equal on all ranks, which so step the same pieces."""
        return sum(part.size * part.rows.element_size() for part in self.parts)

    def start_reduce(self, keep_whole: bool) -> None:
        """Send each owner its rows of these gradients."""
        if self.group is None:
            return
        for part in self.parts:
            if part.parameter.grad is None:
                part.parameter.grad = torch.zeros_like(part.parameter)
        wholes = [part.parameter.grad.view(part.matrix) for part in self.parts if part.parameter.grad is not None]
        sent = wholes[0].new_empty(self.group.size(), sum(self.sizes))
        torch._chunk_cat(wholes, dim=0, num_chunks=self.group.size(), out=sent)
        del wholes
        if not keep_whole:
            for part in self.parts:
                part.parameter.grad = None
        self._reducing = ReduceScatter(sent, sent.new_empty(sum(self.sizes)), self.group, self.exposed)

    def finish_reduce(self, keep_whole: bool) -> None:
        """Hand every parameter the sum of its owned rows' gradients."""
        if self._reducing is None:
            for part in self.parts:
                if part.parameter.grad is not None:
                    part.accumulate(part.parameter.grad, keep_whole)
            return
        self._reducing.wait()
        summed = self._reducing.out.split(self.sizes)
        self._reducing = None
        for part, flat in zip(self.parts, summed, strict=True):
            part.accumulate(flat[: part.rows.numel()].view_as(part.rows), keep_whole)

    def drop_gradients(self) -> None:
        for part in self.parts:
            part.gradient = part.parameter.grad = None

    def start_gather(self) -> None:
        """Send the owned rows, as they were trained, to every rank."""
        if self.group is None:
            for part in self.parts:
                if not part.aliased:
                    part.parameter.detach().copy_(part.rows)
            return
        mine = self.parts[0].parameter.new_zeros(sum(self.sizes))
        for part, flat in zip(self.parts, mine.split(self.sizes), strict=True):
            flat[: part.rows.numel()].view_as(part.rows).copy_(part.rows)
        whole = mine.new_empty(self.group.size() * len(mine))
        work = all_gather(whole, mine, group=self.group, async_op=True)
        self._gathering = work, whole.view(self.group.size(), -1)

    def finish_gather(self) -> None:
        """Let the model compute with what came."""
        if self._gathering is None:
            return
        work, whole = self._gathering
        self._gathering = None
        with self.exposed.measure():
            work.wait()
        for part, came in zip(self.parts, whole.split(self.sizes, dim=1), strict=True):
            matrix = part.parameter.detach().view(part.matrix)
            if matrix.numel() == came.numel():
                matrix.view(came.shape).copy_(came)
            else:
                matrix.copy_(came.reshape(-1, part.matrix[1])[: len(matrix)])


def _trainable(parameters: Iterable[tuple[str, nn.Parameter]]) -> Iterator[tuple[str, nn.Parameter]]:
    """Those that are not frozen: every rank keeps the others whole, and trains nothing of them."""
    return ((name, parameter) for name, parameter in parameters if parameter.requires_grad)


def _master_copy(rows: Tensor, device: torch.device, offload: CpuOffload | None) -> Tensor:
    """Rows that are trained apart from the parameter; a tensor without memory gives rows to be filled."""
    if offload is not None:
        return offload.to_host(rows)
    return torch.empty_like(rows, device=device) if rows.is_meta else rows.to(device, copy=True)


def _make_buckets(rows: Iterable[OwnedParameter], limit: float) -> list[list[OwnedParameter]]:
    """Buckets of about `limit` bytes of parameters of one dtype, in the order in which the backward pass comes by."""
    buckets: list[list[OwnedParameter]] = []
    size = 0
    for part in reversed(list(rows)):
        parameter = part.parameter
        last = buckets[-1][0] if buckets else None
        alike = last is not None and (last.split, last.parameter.dtype) == (part.split, parameter.dtype)
        if not alike or size >= limit:
            buckets.append([])
            size = 0
        buckets[-1].append(part)
        size += parameter.numel() * parameter.element_size()
    return buckets

"""Buckets of ZeRO-1 and 2: gradients reduced to the owner of each row, parameters gathered from it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from phalanx.parallel.comm.collectives import ReduceScatter, all_gather
from phalanx.parallel.comm.host_copy import copy_to_host
from phalanx.parallel.comm.wait_timer import WaitTimer
from phalanx.parallel.data.offload import CpuOffload
from phalanx.parallel.dtensor_shards import as_dtensor
from phalanx.spec.formatting import MIB
from phalanx.spec.layout import MAX_BF16_SUMS

PIECE_BYTES = 256 * MIB
"""Owned rows that are stepped at once: their gradients are cast to the rows' precision just for it."""


class RowSharding:
    """Which rows of a tensor are this rank's: of N ranks the first own as many as it takes, the last may have fewer."""

    def __init__(self, mesh: DeviceMesh | None) -> None:
        self.mesh = mesh
        self.ranks, self.rank = (mesh.size(), mesh.get_local_rank()) if mesh is not None else (1, 0)

    @property
    def group(self) -> dist.ProcessGroup | None:
        return self.mesh.get_group() if self.mesh is not None else None

    def rows_per_rank(self, full: Tensor) -> int:
        """Rows per rank."""
        return -(-len(full) // self.ranks)

    def rows(self, full: Tensor) -> Tensor:
        """This rank's rows (a view)."""
        rows_per_rank = self.rows_per_rank(full)
        return full.detach()[
            min(self.rank * rows_per_rank, len(full)) : min((self.rank + 1) * rows_per_rank, len(full))
        ]

    def as_dtensor(self, rows: Tensor, full: Tensor) -> Tensor:
        """This rank's rows as part of a tensor like `full`."""
        return rows if self.mesh is None else as_dtensor(rows, self.mesh, [Shard(0)], shape=full.shape)


class OwnedParameter:
    """A parameter that computes, and the rows of it that this rank trains."""

    def __init__(
        self,
        name: str,
        parameter: nn.Parameter,
        sharding: RowSharding,
        master_rows: Tensor | None,
        offload: CpuOffload | None,
        largest_shape: torch.Size,
    ) -> None:
        """`master_rows` are the rows where they are not those of the parameter itself. `largest_shape` is that of the
        largest share that a rank has of the parameter."""
        self.name = name
        self.parameter = parameter
        self.split = sharding
        self.offload = offload
        self.matrix = (len(parameter), parameter[0].numel())
        self.size = sharding.rows_per_rank(parameter) * self.matrix[1]
        """Elements of a rank, with padding."""
        self.largest_numel = largest_shape.numel()
        """By these and the next all ranks cut the same buckets and pieces, which matters to an optimizer that
        communicates."""
        self.largest_size = -(-largest_shape[0] // sharding.ranks) * largest_shape[1:].numel()
        self.is_aliased = master_rows is None
        self.rows = sharding.rows(parameter) if master_rows is None else master_rows
        self.master = nn.Parameter(sharding.as_dtensor(self.rows, parameter))
        self.gradient: Tensor | None = None
        """Of the rows, summed over ranks, in the precision of the model, or of more micro-batches in fp32."""
        self._full_sum: Tensor | None = None
        """Of a step's micro-batches the whole gradient in fp32, where these are many."""
        self._host_gradient: Tensor | None = None
        self._num_added = 0

    @property
    def full_gradient(self) -> Tensor | None:
        """The whole gradient, as far as this rank computed it."""
        return self.parameter.grad if self._full_sum is None else self._full_sum

    def add_full_gradient(self) -> None:
        """Add what autograd left of a micro-batch to a sum in fp32, where there are more than `MAX_BF16_SUMS`."""
        self._num_added += 1
        gradient = self.parameter.grad
        if gradient is None or not needs_fp32_sum(gradient.dtype, self._num_added):
            return
        self._full_sum = gradient.float() if self._full_sum is None else self._full_sum.add_(gradient)
        self.parameter.grad = None

    def drop_full_gradient(self) -> None:
        self.parameter.grad = self._full_sum = None

    def drop_gradient(self) -> None:
        """Forget the step's gradients."""
        self.drop_full_gradient()
        self.gradient = None
        self._num_added = 0

    def accumulate(self, received: Tensor, keep_full: bool) -> None:
        """Keep what came of the gradient: in the whole one's rows, or added to what came of micro-batches before."""
        full_gradient = self.full_gradient
        if full_gradient is not None and (keep_full or self.offload is None):
            self.gradient = self.split.rows(full_gradient)
            if received is not full_gradient:
                self.gradient.copy_(received)
        elif self.offload is not None:
            self._num_added += 1
            self.gradient = self._add_on_host(received, self.offload)
            self.offload.write_back([self.gradient])
            self.drop_full_gradient()
        elif self.gradient is None:
            self.gradient = received
            self._num_added = 1
        else:
            self._num_added += 1
            if needs_fp32_sum(self.gradient.dtype, self._num_added):
                self.gradient = self.gradient.float()
            self.gradient.add_(received)

    def _add_on_host(self, received: Tensor, offload: CpuOffload) -> Tensor:
        """Return the sum that rests in CPU memory, in which the step's first gradient replaces those of the last."""
        is_first = self.gradient is None
        if self._host_gradient is None:
            self._host_gradient = offload.to_host(received)
        elif is_first:
            self._host_gradient.copy_(received)
        else:
            if needs_fp32_sum(self._host_gradient.dtype, self._num_added):
                self._host_gradient = offload.to_host(self._host_gradient.float())
            self._host_gradient.add_(received)
        return self._host_gradient

    def master_gradient(self, factor: Tensor | None) -> Tensor | None:
        """The gradient, times a factor in CPU memory, where and as precise as the master is. It comes to CPU memory by
        `wait_for_host_copies`."""
        if self.gradient is None:
            return None
        scaled = self.gradient if factor is None else self.gradient * factor.to(self.gradient.dtype)
        scaled = scaled.to(self.rows.dtype).to(self.rows.device, non_blocking=True)
        return self.split.as_dtensor(scaled, self.parameter)


class Bucket:
    """Parameters whose gradients are sent at once, and whose rows are gathered at once.

    On the way they lie in a buffer [N, n]: for each rank its rows of every parameter, padded where they are fewer.
    """

    def __init__(self, parts: list[OwnedParameter], sharding: RowSharding, exposed: WaitTimer) -> None:
        self.parts = parts
        self.exposed = exposed
        self.group = sharding.group
        self.sizes = [part.size for part in parts]
        self.num_missing = len(parts)
        """Gradients of the micro-batch under way that have not come yet."""
        self._reducing: ReduceScatter | None = None
        self._gathering: tuple[dist.Work, Tensor] | None = None

    @property
    def nbytes(self) -> int:
        """Of the owned rows, with padding, on the rank that has most of them: all ranks step the same pieces."""
        return sum(part.largest_size * part.rows.element_size() for part in self.parts)

    def start_reduce(self, keep_full: bool) -> None:
        """Send each owner its rows of these gradients."""
        if self.group is None:
            return
        for part in self.parts:
            if part.full_gradient is None:
                part.parameter.grad = torch.zeros_like(part.parameter)
        sent = self.parts[0].parameter.new_empty(self.group.size(), sum(self.sizes))
        torch._chunk_cat(self._full_matrices(), dim=0, num_chunks=self.group.size(), out=sent)
        if not keep_full:
            for part in self.parts:
                part.drop_full_gradient()
        self._reducing = ReduceScatter(sent, sent.new_empty(sum(self.sizes)), self.group, exposed=self.exposed)

    def _full_matrices(self) -> list[Tensor]:
        """Return the whole gradients as matrices, in one dtype."""
        gradients = [part.full_gradient for part in self.parts if part.full_gradient is not None]
        dtype = max((gradient.dtype for gradient in gradients), key=lambda dtype: dtype.itemsize)
        return [gradient.to(dtype).view(part.matrix) for gradient, part in zip(gradients, self.parts, strict=True)]

    def finish_reduce(self, keep_full: bool) -> None:
        """Hand every parameter the sum of its owned rows' gradients."""
        if self._reducing is None:
            parts = [part for part in self.parts if part.full_gradient is not None]
            received = [part.full_gradient for part in parts if part.full_gradient is not None]
        else:
            self._reducing.wait()
            parts = self.parts
            summed = self._reducing.out.split(self.sizes)
            self._reducing = None
            received = [flat[: part.rows.numel()].view_as(part.rows) for part, flat in zip(parts, summed, strict=True)]
        if self.parts[0].offload is not None and not keep_full:
            received = copy_to_host(*received)
        for part, gradient in zip(parts, received, strict=True):
            part.accumulate(gradient, keep_full)

    def drop_gradients(self) -> None:
        for part in self.parts:
            part.drop_gradient()

    def start_gather(self) -> None:
        """Send the owned rows, as they were trained, to every rank."""
        if self.group is None:
            for part in self.parts:
                if not part.is_aliased:
                    part.parameter.detach().copy_(part.rows.to(part.parameter.device, non_blocking=True))
            return
        local_rows = self.parts[0].parameter.new_zeros(sum(self.sizes))
        for part, flat in zip(self.parts, local_rows.split(self.sizes), strict=True):
            # Cast there: the host would cast into memory that is not pinned, and wait for the device.
            rows = part.rows.to(flat.device, non_blocking=True)
            flat[: part.rows.numel()].view_as(part.rows).copy_(rows)
        gathered = local_rows.new_empty(self.group.size() * len(local_rows))
        work = all_gather(gathered, local_rows, group=self.group, async_op=True)
        self._gathering = work, gathered.view(self.group.size(), -1)

    def finish_gather(self) -> None:
        """Let the model compute with what came."""
        if self._gathering is None:
            return
        work, gathered = self._gathering
        self._gathering = None
        with self.exposed.measure():
            work.wait()
        for part, received in zip(self.parts, gathered.split(self.sizes, dim=1), strict=True):
            matrix = part.parameter.detach().view(part.matrix)
            if matrix.numel() == received.numel():
                matrix.view(received.shape).copy_(received)
            else:
                matrix.copy_(received.reshape(-1, part.matrix[1])[: len(matrix)])


def needs_fp32_sum(dtype: torch.dtype, micro_batches: int) -> bool:
    """Whether the sum of gradients in this dtype is to be kept in fp32: bf16 rounds at each addition, by more the more
    the sum is above what is added."""
    return dtype.itemsize < 4 and micro_batches > MAX_BF16_SUMS


def trainable_parameters_of(parameters: Iterable[tuple[str, nn.Parameter]]) -> Iterator[tuple[str, nn.Parameter]]:
    """Those that are not frozen: every rank keeps the others whole, and trains nothing of them."""
    return ((name, parameter) for name, parameter in parameters if parameter.requires_grad)


def master_copy(rows: Tensor, device: torch.device, offload: CpuOffload | None) -> Tensor:
    """Rows that are trained apart from the parameter; a tensor without memory gives rows to be filled."""
    if offload is not None:
        return offload.to_host(rows)
    return torch.empty_like(rows, device=device) if rows.is_meta else rows.to(device, copy=True)


def make_buckets(owned: Iterable[OwnedParameter], limit: float) -> list[list[OwnedParameter]]:
    """Buckets of about `limit` bytes of parameters of one dtype, in the order in which the backward pass comes by."""
    buckets: list[list[OwnedParameter]] = []
    size = 0
    for part in reversed(list(owned)):
        parameter = part.parameter
        previous = buckets[-1][0] if buckets else None
        is_compatible = previous is not None and (previous.split, previous.parameter.dtype) == (
            part.split,
            parameter.dtype,
        )
        if not is_compatible or size >= limit:
            buckets.append([])
            size = 0
        buckets[-1].append(part)
        size += part.largest_numel * parameter.element_size()
    return buckets

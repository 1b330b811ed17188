"""Buckets of ZeRO-1 and 2: each row's gradient is reduced to its owner, and the row gathered from it."""

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
"""Bytes of owned rows that are stepped at once; their gradients are cast to the rows' precision."""


class RowSharding:
    """Assignment of a tensor's rows to N ranks.

    All ranks own equally many rows (rounded up), except that the last ranks may have fewer."""

    def __init__(self, mesh: DeviceMesh | None) -> None:
        self.mesh = mesh
        self.ranks = 1 if mesh is None else mesh.size()
        self.rank = 0 if mesh is None else mesh.get_local_rank()

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group of the mesh; None for a single rank."""
        return self.mesh.get_group() if self.mesh is not None else None

    def rows_per_rank(self, full: Tensor) -> int:
        """Return the number of rows per rank, with padding."""
        return -(-len(full) // self.ranks)

    def rows(self, full: Tensor) -> Tensor:
        """Return this rank's rows (a view)."""
        start = self.rank * self.rows_per_rank(full)
        end = start + self.rows_per_rank(full)
        return full.detach()[min(start, len(full)) : min(end, len(full))]

    def as_dtensor(self, rows: Tensor, full: Tensor) -> Tensor:
        """Return this rank's rows as part of a tensor like `full`."""
        return rows if self.mesh is None else as_dtensor(rows, self.mesh, [Shard(0)], shape=full.shape)


class OwnedParameter:
    """A parameter of the model, and the rows of it that this rank trains."""

    def __init__(
        self,
        name: str,
        parameter: nn.Parameter,
        sharding: RowSharding,
        master_rows: Tensor | None,
        offload: CpuOffload | None,
        largest_shape: torch.Size,
    ) -> None:
        """Create the trained rows of a parameter.

        Args:
            name: Name of the parameter.
            parameter: Parameter that computes.
            sharding: Assignment of rows to ranks.
            master_rows: Separate trained rows; None if the parameter's own rows are trained.
            offload: Storage of the trained rows, if not the device.
            largest_shape: Shape of the largest shard of the parameter on any rank.
        """
        self.name = name
        self.parameter = parameter
        self.sharding = sharding
        self.offload = offload
        self.matrix = (len(parameter), parameter[0].numel())
        self.size = sharding.rows_per_rank(parameter) * self.matrix[1]
        """Number of elements per rank, with padding."""
        self.largest_numel = largest_shape.numel()
        """With this number and `largest_size`, all ranks form the same buckets and pieces.

        Equal pieces matter to an optimizer that communicates."""
        self.largest_size = -(-largest_shape[0] // sharding.ranks) * largest_shape[1:].numel()
        self.is_aliased = master_rows is None
        self.rows = sharding.rows(parameter) if master_rows is None else master_rows
        self.master = nn.Parameter(sharding.as_dtensor(self.rows, parameter))
        self.gradient: Tensor | None = None
        """Gradient of the rows, summed over ranks, in the model's dtype, or in fp32 for many micro-batches."""
        self._full_sum: Tensor | None = None
        """Full gradient of a step's micro-batches in fp32, if there are many."""
        self._host_gradient: Tensor | None = None
        self._num_added = 0

    @property
    def full_gradient(self) -> Tensor | None:
        """The full gradient, as this rank has computed it so far: the fp32 sum if there is one.

        Autograd writes each micro-batch's gradient to `parameter.grad`. All other code reads this property and writes
        with the methods below."""
        return self.parameter.grad if self._full_sum is None else self._full_sum

    def add_full_gradient(self) -> None:
        """Add a micro-batch's gradient to an fp32 sum, if there are more than `MAX_BF16_SUMS`."""
        self._num_added += 1
        gradient = self.parameter.grad
        if gradient is None or not needs_fp32_sum(gradient.dtype, self._num_added):
            return
        self._full_sum = gradient.float() if self._full_sum is None else self._full_sum.add_(gradient)
        self.parameter.grad = None

    def add_to_full_gradient(self, gradient: Tensor) -> None:
        """Add a term other than a micro-batch of this rank, in the precision of the sum."""
        if self.full_gradient is None:
            self.parameter.grad = gradient
        else:
            self.full_gradient.add_(gradient)

    def drop_full_gradient(self) -> None:
        """Drop the full gradient."""
        self.parameter.grad = self._full_sum = None

    def drop_gradient(self) -> None:
        """Drop the gradients of the step."""
        self.drop_full_gradient()
        self.gradient = None
        self._num_added = 0

    def accumulate(self, received: Tensor, keep_full: bool) -> None:
        """Save a reduced gradient in the full gradient's rows, or add it to those of earlier micro-batches."""
        full_gradient = self.full_gradient
        if full_gradient is not None and (keep_full or self.offload is None):
            self.gradient = self.sharding.rows(full_gradient)
            if received is not full_gradient:
                self.gradient.copy_(received)
            return
        self._num_added += 1
        if self.offload is None:
            self.gradient = self._add_on_device(received)
            return
        self.gradient = self._add_on_host(received, self.offload)
        self.offload.write_back([self.gradient])
        self.drop_full_gradient()

    def _add_on_device(self, received: Tensor) -> Tensor:
        """Return the sum; the step's first gradient starts it."""
        if self.gradient is None:
            self._num_added = 1
            return received
        if needs_fp32_sum(self.gradient.dtype, self._num_added):
            self.gradient = self.gradient.float()
        return self.gradient.add_(received)

    def _add_on_host(self, received: Tensor, offload: CpuOffload) -> Tensor:
        """Return the sum in CPU memory; the step's first gradient replaces the sum of the last step."""
        is_first = self.gradient is None
        if self._host_gradient is None:
            self._host_gradient = offload.to_host(received)
        elif is_first:
            self._host_gradient.copy_(received)
        else:
            if needs_fp32_sum(self._host_gradient.dtype, self._num_added):
                narrow_sum = self._host_gradient
                self._host_gradient = offload.to_host(narrow_sum.float())
                offload.release(narrow_sum)
            self._host_gradient.add_(received)
        return self._host_gradient

    def master_gradient(self, factor: Tensor | None) -> Tensor | None:
        """Return the scaled gradient with the device and dtype of the master.

        The optional `factor` is in CPU memory. A gradient is complete in CPU memory after `wait_for_host_copies`."""
        if self.gradient is None:
            return None
        scaled = self.gradient if factor is None else self.gradient * factor.to(self.gradient.dtype)
        scaled = scaled.to(self.rows.dtype).to(self.rows.device, non_blocking=True)
        return self.sharding.as_dtensor(scaled, self.parameter)


class Bucket:
    """Parameters whose gradients are sent in one message, and whose rows are gathered in one message.

    The message buffer is [N, n]: for each rank its rows of every parameter, padded where there are fewer."""

    def __init__(self, parameters: list[OwnedParameter], comm_wait: WaitTimer) -> None:
        self.parameters = parameters
        self.comm_wait = comm_wait
        self.group = parameters[0].sharding.group
        self.sizes = [owned.size for owned in parameters]
        self.message_bytes = parameters[0].sharding.ranks * sum(self.sizes) * parameters[0].parameter.element_size()
        self.num_missing = len(parameters)
        """Number of gradients of the current micro-batch that are not ready.

        Meaningless in the passes of a pipeline, which overlap and send nothing."""
        self._reducing: ReduceScatter | None = None
        self._gathering: tuple[dist.Work, Tensor] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the owned rows, with padding, on the rank with the most rows.

        The number is equal on all ranks, so they step the same pieces."""
        return sum(owned.largest_size * owned.rows.element_size() for owned in self.parameters)

    def start_reduce(self, keep_full: bool) -> None:
        """Start to send each owner its rows of these gradients."""
        if self.group is None:
            return
        for owned in self.parameters:
            if owned.full_gradient is None:
                owned.add_to_full_gradient(torch.zeros_like(owned.parameter))
        sent = self.parameters[0].parameter.new_empty(self.group.size(), sum(self.sizes))
        torch._chunk_cat(self._full_matrices(), dim=0, num_chunks=self.group.size(), out=sent)
        if not keep_full:
            for owned in self.parameters:
                owned.drop_full_gradient()
        self._reducing = ReduceScatter(sent, sent.new_empty(sum(self.sizes)), self.group, comm_wait=self.comm_wait)

    def _full_matrices(self) -> list[Tensor]:
        """Return the full gradients as matrices of one dtype, fp32 if a sum is fp32.

        Messages have the dtype of the model, so `start_reduce` rounds fp32 sums to bf16."""
        gradients = [owned.full_gradient for owned in self.parameters if owned.full_gradient is not None]
        dtype = max((gradient.dtype for gradient in gradients), key=lambda dtype: dtype.itemsize)
        return [
            gradient.to(dtype).view(owned.matrix) for gradient, owned in zip(gradients, self.parameters, strict=True)
        ]

    def finish_reduce(self, keep_full: bool) -> None:
        """Wait for the reduction, and give every parameter the sum of its owned rows' gradients."""
        if self._reducing is None:
            parameters = [owned for owned in self.parameters if owned.full_gradient is not None]
            received = [owned.full_gradient for owned in parameters if owned.full_gradient is not None]
        else:
            parameters = self.parameters
            received = self._reduced_rows(self._reducing)
            self._reducing = None
        if self.parameters[0].offload is not None and not keep_full:
            received = copy_to_host(*received)
        for owned, gradient in zip(parameters, received, strict=True):
            owned.accumulate(gradient, keep_full)

    def _reduced_rows(self, reducing: ReduceScatter) -> list[Tensor]:
        """Wait for a reduction, and return the summed gradients of the owned rows of each parameter."""
        reducing.wait()
        pairs = zip(self.parameters, reducing.out.split(self.sizes), strict=True)
        return [flat[: owned.rows.numel()].view_as(owned.rows) for owned, flat in pairs]

    def drop_gradients(self) -> None:
        """Drop the gradients of all parameters of the bucket."""
        for owned in self.parameters:
            owned.drop_gradient()

    def start_gather(self) -> None:
        """Start to send the owned rows, as trained, to every rank."""
        if self.group is None:
            for owned in self.parameters:
                if not owned.is_aliased:
                    owned.parameter.detach().copy_(owned.rows.to(owned.parameter.device, non_blocking=True))
            return
        local_rows = self.parameters[0].parameter.new_zeros(sum(self.sizes))
        for owned, flat in zip(self.parameters, local_rows.split(self.sizes), strict=True):
            # Cast on the device: the host would cast into memory that is not pinned, and wait for the device.
            rows = owned.rows.to(flat.device, non_blocking=True)
            flat[: owned.rows.numel()].view_as(owned.rows).copy_(rows)
        gathered = local_rows.new_empty(self.group.size() * len(local_rows))
        work = all_gather(gathered, local_rows, group=self.group, async_op=True)
        self._gathering = work, gathered.view(self.group.size(), -1)

    def finish_gather(self, copies: bool = True) -> None:
        """Wait for the gathered rows, and copy them to the model's parameters if `copies`."""
        if self._gathering is None:
            return
        work, gathered = self._gathering
        self._gathering = None
        with self.comm_wait.measure():
            work.wait()
        parameters = self.parameters if copies else []
        for owned, received in zip(parameters, gathered.split(self.sizes, dim=1), strict=copies):
            matrix = owned.parameter.detach().view(owned.matrix)
            if matrix.numel() == received.numel():
                matrix.view(received.shape).copy_(received)
            else:
                matrix.copy_(received.reshape(-1, owned.matrix[1])[: len(matrix)])


def needs_fp32_sum(dtype: torch.dtype, micro_batches: int) -> bool:
    """Return whether the sum of gradients of this dtype must be fp32.

    bf16 rounds at each addition; the error grows with the ratio of the sum to the addend."""
    return dtype.itemsize < 4 and micro_batches > MAX_BF16_SUMS


def trainable_parameters_of(parameters: Iterable[tuple[str, nn.Parameter]]) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters that are not frozen; every rank has full frozen parameters."""
    return ((name, parameter) for name, parameter in parameters if parameter.requires_grad)


def master_copy(rows: Tensor, device: torch.device, offload: CpuOffload | None) -> Tensor:
    """Return separate rows to train; for a tensor without memory, uninitialized rows.

    Args:
        rows: This rank's rows of a parameter, in the dtype that is trained.
        device: Device of the copy without offload.
        offload: Storage of the copy; None for `device`.
    """
    if offload is not None:
        return offload.to_host(rows)
    return torch.empty_like(rows, device=device) if rows.is_meta else rows.to(device, copy=True)


def make_buckets(parameters: Iterable[OwnedParameter], limit: float) -> list[list[OwnedParameter]]:
    """Return buckets of about `limit` bytes of one dtype, in the order of the backward pass."""
    buckets: list[list[OwnedParameter]] = []
    size = 0
    for owned in reversed(list(parameters)):
        parameter = owned.parameter
        if not buckets or size >= limit or not _fit_one_message(buckets[-1][0], owned):
            buckets.append([])
            size = 0
        buckets[-1].append(owned)
        size += owned.largest_numel * parameter.element_size()
    return buckets


def _fit_one_message(owned: OwnedParameter, other: OwnedParameter) -> bool:
    return owned.sharding == other.sharding and owned.parameter.dtype == other.parameter.dtype

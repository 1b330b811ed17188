"""Parameters of ZeRO-1 and 2: the rows that a rank trains, and the gradients of a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from phalanx.parallel.data.offload import CpuOffload
from phalanx.parallel.dtensor_shards import as_dtensor, rows_per_rank
from phalanx.spec.layout import MAX_BF16_SUMS
from phalanx.spec.tensor_sharding import data_parallel_axis, max_shard_elements


class RowSharding:
    """Assignment of a tensor's rows to N ranks.

    In a stack of fewer matrices than ranks, each matrix's rows are assigned.

    All ranks own equally many rows (rounded up), except that the last ranks may have fewer."""

    def __init__(self, mesh: DeviceMesh | None) -> None:
        self.mesh = mesh
        self.ranks = 1 if mesh is None else mesh.size()
        self.rank = 0 if mesh is None else mesh.get_local_rank()

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group of the mesh; None for a single rank."""
        return self.mesh.get_group() if self.mesh is not None else None

    def axis(self, full: Tensor) -> int:
        """Return the axis of the rows."""
        return data_parallel_axis(full.shape, self.ranks)

    def rows(self, full: Tensor) -> Tensor:
        """Return this rank's rows (a view)."""
        axis = self.axis(full)
        counts = rows_per_rank(full.shape[axis], self.ranks)
        return full.detach().narrow(axis, sum(counts[: self.rank]), counts[self.rank])

    def by_rank(self, full: Tensor) -> Tensor:
        """Return a view [N, ...] of a tensor with the rows of each rank; all ranks must own equally many."""
        axis = self.axis(full)
        return full.unflatten(axis, (self.ranks, -1)).movedim(axis, 0)

    def as_dtensor(self, rows: Tensor, full: Tensor) -> Tensor:
        """Return this rank's rows as part of a tensor like `full`."""
        return rows if self.mesh is None else as_dtensor(rows, self.mesh, [Shard(self.axis(full))], full.shape)


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

        Without `master_rows` the parameter's own rows are trained. `offload` stores the trained rows; None: the device
        does. `largest_shape` is the shape of the largest shard on any rank."""
        self.name = name
        self.parameter = parameter
        self.sharding = sharding
        self.offload = offload
        self.axis = sharding.axis(parameter)
        self.matrix = (len(parameter), parameter.shape[1:].numel())
        self.size = max_shard_elements(parameter.shape, sharding.ranks)
        """Number of elements per rank, with padding."""
        self.largest_numel = largest_shape.numel()
        """Size of the largest shard, from which (with `largest_size`) all ranks form the same buckets and pieces.

        Equal pieces matter to an optimizer that communicates."""
        self.largest_size = max_shard_elements(largest_shape, sharding.ranks)
        self.is_aliased = master_rows is None
        self.rows = sharding.rows(parameter) if master_rows is None else master_rows
        self.master = nn.Parameter(sharding.as_dtensor(self.rows, parameter))
        self.gradient: Tensor | None = None
        """Gradient of the rows, summed over ranks, in the model's dtype, or in fp32 for many micro-batches."""
        self._full_sum: Tensor | None = None
        """Full gradient of a step's micro-batches in fp32, if there are many."""
        self._host_gradient: Tensor | None = None
        self.num_added = 0
        """Number of micro-batches whose gradients are in the sum."""
        self._seen_version = -1
        """Version of `parameter.grad` that was counted last."""

    @property
    def full_gradient(self) -> Tensor | None:
        """The full gradient, as this rank has computed it so far: the fp32 sum if there is one.

        Autograd writes each micro-batch's gradient to `parameter.grad`. All other code reads this property and writes
        with the methods below."""
        return self.parameter.grad if self._full_sum is None else self._full_sum

    def add_full_gradient(self) -> None:
        """Add a micro-batch's gradient to an fp32 sum, if there are more than `MAX_BF16_SUMS`.

        Autograd calls it twice in a split backward pass, whose first half leaves gradients of products unchanged."""
        gradient = self.parameter.grad
        if gradient is None or gradient._version == self._seen_version:
            return
        self.num_added += 1
        self._seen_version = gradient._version
        if needs_fp32_sum(gradient.dtype, self.num_added):
            self._full_sum = gradient.float() if self._full_sum is None else self._full_sum.add_(gradient)
            self._drop_parameter_gradient()

    def add_to_full_gradient(self, gradient: Tensor) -> None:
        """Add a term other than a micro-batch of this rank, in the precision of the sum."""
        if self.full_gradient is None:
            self.parameter.grad = gradient
        else:
            self.full_gradient.add_(gradient)

    def drop_full_gradient(self) -> None:
        """Drop the full gradient."""
        self._drop_parameter_gradient()
        self._full_sum = None

    def _drop_parameter_gradient(self) -> None:
        self.parameter.grad = None
        self._seen_version = -1

    def drop_gradient(self) -> None:
        """Drop the gradients of the step."""
        self.drop_full_gradient()
        self.gradient = None
        self.num_added = 0

    def accumulate(self, received: Tensor, keep_full: bool) -> None:
        """Save a reduced gradient in the full gradient's rows, or add it to those of earlier micro-batches."""
        full_gradient = self.full_gradient
        if full_gradient is not None and (keep_full or self.offload is None):
            self.gradient = self.sharding.rows(full_gradient)
            if received is not full_gradient:
                self.gradient.copy_(received)
            return
        self.num_added += 1
        if self.offload is None:
            self.gradient = self._add_on_device(received)
            return
        self.gradient = self._add_on_host(received, self.offload)
        self.offload.write_back([self.gradient])
        self.drop_full_gradient()

    def _add_on_device(self, received: Tensor) -> Tensor:
        """Return the sum so far, which the step's first gradient starts."""
        if self.gradient is None:
            self.num_added = 1
            return received
        if needs_fp32_sum(self.gradient.dtype, self.num_added):
            self.gradient = self.gradient.float()
        return self.gradient.add_(received)

    def _add_on_host(self, received: Tensor, offload: CpuOffload) -> Tensor:
        """Return the sum so far in CPU memory, where the step's first gradient replaces the sum of the last step."""
        is_first = self.gradient is None
        if self._host_gradient is None:
            self._host_gradient = offload.to_host(received)
        elif is_first:
            self._host_gradient.copy_(received)
        else:
            if needs_fp32_sum(self._host_gradient.dtype, self.num_added):
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
        # Fused AdamW needs contiguous gradients.
        scaled = scaled.to(self.rows.dtype).to(self.rows.device, non_blocking=True).contiguous()
        return self.sharding.as_dtensor(scaled, self.parameter)


def needs_fp32_sum(dtype: torch.dtype, micro_batches: int) -> bool:
    """Return whether the sum of gradients of this dtype must be fp32.

    bf16 rounds at each addition; the error grows with the ratio of the sum to the addend."""
    return dtype.itemsize < 4 and micro_batches > MAX_BF16_SUMS


def trainable_parameters_of(parameters: Iterable[tuple[str, nn.Parameter]]) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters that are not frozen; every rank has full frozen parameters."""
    return ((name, parameter) for name, parameter in parameters if parameter.requires_grad)


def master_copy(rows: Tensor, device: torch.device, offload: CpuOffload | None) -> Tensor:
    """Return separate rows to train, in `offload` or on the device; for a tensor without memory, uninitialized rows."""
    if offload is not None:
        return offload.to_host(rows)
    return torch.empty_like(rows, device=device) if rows.is_meta else rows.to(device, copy=True)

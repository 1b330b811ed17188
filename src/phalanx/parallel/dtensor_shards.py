"""Local shards of tensors that are sharded over ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from phalanx.spec.tensor_sharding import rows_on_rank


def rows_per_rank(total: int, ranks: int) -> list[int]:
    """Return the number of rows of each rank with Shard(0)."""
    return [rows_on_rank(rank, total, ranks) for rank in range(ranks)]


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's shard, or a tensor that is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_shape_and_offset(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape of this rank's shard, and its offset in the full tensor."""
    if not isinstance(tensor, DTensor):
        return tuple(tensor.shape), (0,) * tensor.ndim
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(shape), tuple(offset)


def as_dtensor(local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size) -> DTensor:
    """Return a DTensor with `local` as this rank's shard.

    Unlike `DTensor.from_local`, this leaves the shard on its device, which may differ from the mesh's."""
    stride = tuple(torch.empty(shape, device="meta").stride())
    spec = DTensorSpec(mesh, tuple(placements), TensorMeta(shape, stride, local.dtype))
    return DTensor(local, spec, requires_grad=False)  # as FSDP2 does it

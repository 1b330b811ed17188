"""The norm of the full gradient, whose shards may be on several meshes, and the clipping of gradients by it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from phalanx.parallel.comm.collectives import to_group_device
from phalanx.parallel.comm.wait_timer import WaitTimer
from phalanx.parallel.dtensor_shards import local_tensor


@torch.no_grad()
def global_grad_norm(gradients: Sequence[Tensor], comm_wait: WaitTimer | None = None) -> Tensor:
    """Return the L2 norm over all gradients and ranks (scalar, at least fp32).

    Shards over the same groups are summed locally and all-reduced once over each group, in the order of the axes of
    their meshes: tensor parallelism before data parallelism. Replicated gradients are counted once. (`clip_grad_norm_`
    rejects parameters of different meshes.) The order of `gradients` determines the order of the collectives, so it
    must be equal on all ranks."""
    total = None
    for groups, local_gradients in _group_shards(gradients).items():
        dtype = torch.float32 if local_gradients[0].dtype == torch.bfloat16 else None
        square = torch.stack(torch._foreach_norm(local_gradients, 2, dtype)).square().sum()
        for group in groups:
            square = to_group_device(square, group)
            with comm_wait.measure() if comm_wait else nullcontext():
                dist.all_reduce(square, group=group)
        total = square if total is None else total.to(square.device) + square
    return torch.zeros(()) if total is None else total.sqrt()


def _group_shards(gradients: Sequence[Tensor]) -> dict[tuple[dist.ProcessGroup, ...], list[Tensor]]:
    """Return this rank's shards by the groups over which their gradients are sharded."""
    shards: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        groups: tuple[dist.ProcessGroup, ...] = ()
        if isinstance(gradient, DTensor):
            axes = [axis for axis, placement in enumerate(gradient.placements) if placement.is_shard()]
            groups = tuple(gradient.device_mesh.get_group(axis) for axis in axes)
        shards[groups].append(local_tensor(gradient))
    return shards


def clip_coefficient(norm: Tensor, limit: float) -> Tensor:
    """Return the factor that limits a gradient of this norm to the norm `limit` (0: unlimited)."""
    return (limit / (norm + 1e-6)).clamp(max=1.0) if limit else torch.ones_like(norm)


@torch.no_grad()
def scale_gradients(gradients: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply every gradient by a scalar in place; the scalar is rounded to the dtype of the first gradient."""
    local_gradients = [local_tensor(gradient) for gradient in gradients]
    if local_gradients:
        torch._foreach_mul_(local_gradients, factor.to(local_gradients[0].device, local_gradients[0].dtype))

"""The norm of the whole gradient, whatever meshes its parts live on, and scaling by it."""

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
def global_grad_norm(gradients: Sequence[Tensor], exposed: WaitTimer | None = None) -> Tensor:
    """The L2 norm over all gradients and ranks (scalar, at least fp32); `exposed` counts the waiting. All ranks give
    their gradients in one order, which is that of the collectives.

    Parts that are split over the same groups are summed locally and all-reduced once over each of them; replicated
    parts are counted once. (`clip_grad_norm_` refuses parameters of different meshes.)
    """
    parts: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        if isinstance(gradient, DTensor):
            mesh = gradient.device_mesh
            split = [axis for axis, placement in enumerate(gradient.placements) if placement.is_shard()]
            parts[tuple(mesh.get_group(axis) for axis in split)].append(local_tensor(gradient))
        else:
            parts[()].append(gradient)
    total = None
    for groups, local_gradients in parts.items():
        dtype = torch.float32 if local_gradients[0].dtype == torch.bfloat16 else None
        square = torch.stack(torch._foreach_norm(local_gradients, 2, dtype)).square().sum()
        for group in groups:
            square = to_group_device(square, group)
            with exposed.measure() if exposed else nullcontext():
                dist.all_reduce(square, group=group)
        total = square if total is None else total.to(square.device) + square
    return torch.zeros(()) if total is None else total.sqrt()


def clip_coefficient(norm: Tensor, limit: float) -> Tensor:
    """What a gradient of this norm is multiplied by so that its norm is at most `limit` (0: any)."""
    return (limit / (norm + 1e-6)).clamp(max=1.0) if limit else torch.ones_like(norm)


@torch.no_grad()
def scale_gradients(gradients: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply every gradient by a scalar (in place)."""
    local_gradients = [local_tensor(gradient) for gradient in gradients]
    if local_gradients:
        torch._foreach_mul_(local_gradients, factor.to(local_gradients[0].device, local_gradients[0].dtype))

"""The norm of the whole gradient, whatever meshes its parts live on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from phalanx.parallel.exposed import ExposedTime


def local_gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    """This rank's part of every gradient there is."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    return [g.to_local() if isinstance(g, DTensor) else g for g in gradients]


@torch.no_grad()
def global_norm(parameters: Iterable[Tensor], exposed: ExposedTime | None = None) -> Tensor:
    """The L2 norm of the gradient over all parameters and ranks (scalar); `exposed` counts the waiting.

    Parts that are split over the same groups are summed locally and all-reduced once over each of them; replicated
    parts are counted once. (`clip_grad_norm_` refuses parameters of different meshes.)
    """
    parts: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        gradient = parameter.grad
        if isinstance(gradient, DTensor):
            mesh = gradient.device_mesh
            split = [axis for axis, placement in enumerate(gradient.placements) if placement.is_shard()]
            parts[tuple(mesh.get_group(axis) for axis in split)].append(gradient.to_local())
        elif gradient is not None:
            parts[()].append(gradient)
    total = None
    for groups, gradients in parts.items():
        square = torch.stack(torch._foreach_norm(gradients)).square().sum()
        for group in groups:
            with exposed.waiting() if exposed else nullcontext():
                dist.all_reduce(square, group=group)
        total = square if total is None else total + square
    return torch.zeros(()) if total is None else total.sqrt()


@torch.no_grad()
def clip(parameters: Iterable[Tensor], norm: Tensor, limit: float) -> None:
    """Scale every gradient by limit / norm where the norm is above the limit (in place)."""
    gradients = local_gradients(parameters)
    scale = (limit / (norm + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_(gradients, scale.to(gradients[0].device))

"""Exchange of Python objects between ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch.distributed as dist

T = TypeVar("T")


def rank_and_world_size() -> tuple[int, int]:
    """Return this process's rank and the number of ranks; (0, 1) without torch.distributed."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def broadcast_object(value: T, src: int) -> T:
    """Return the value of rank `src`, on all ranks. Without torch.distributed, return `value`."""
    values = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(values, src=src)
    return values[0]


def broadcast_from_rank0(compute: Callable[[], T]) -> T:
    """Call `compute` on rank 0 only and return its result on all ranks: other ranks may see different files."""
    return cast(T, broadcast_object(compute() if rank_and_world_size()[0] == 0 else None, src=0))


def all_gather_objects(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the values of all ranks, in rank order. Without torch.distributed, return `[value]`."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values

"""Exchange of Python objects between ranks."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar, cast

import torch.distributed as dist

T = TypeVar("T")
Outcome: TypeAlias = tuple[T | None, Exception | None]
"""Result or error of a call."""


def rank_and_world_size() -> tuple[int, int]:
    """Return this process's rank and the number of ranks; (0, 1) without torch.distributed."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def broadcast_object(value: T, src: int, group: dist.ProcessGroup | None = None) -> T:
    """Return the value of rank `src`, on all ranks. Without torch.distributed, return `value`."""
    values = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(values, src=src, group=group)
    return values[0]


def broadcast_from_rank0(compute: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Call `compute` on rank 0 only and return its result on all ranks: other ranks may see different files.

    An error is raised on all ranks, so that none waits for the result."""
    outcome = _call(compute) if rank_and_world_size()[0] == 0 else None
    result, error = cast(Outcome[T], broadcast_object(outcome, src=0, group=group))
    if error is not None:
        raise error
    return cast(T, result)


def gather_results(compute: Callable[[], T], group: dist.ProcessGroup | None = None) -> list[T]:
    """Call `compute` on each rank and return the results in rank order, or raise the first error, on all ranks."""
    outcomes = all_gather_objects(_call(compute), group)
    for _, error in outcomes:
        if error is not None:
            raise error
    return [cast(T, result) for result, _ in outcomes]


def _call(compute: Callable[[], T]) -> Outcome[T]:
    try:
        return compute(), None
    except Exception as error:
        if not dist.is_initialized():
            raise
        return None, _picklable(error)


def _picklable(error: Exception) -> Exception:
    """Return an error that other ranks can read: those of some packages cannot be pickled, or not be read again."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def all_gather_objects(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the values of all ranks, in rank order. Without torch.distributed, return `[value]`."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values

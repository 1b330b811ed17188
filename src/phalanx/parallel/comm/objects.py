"""Send Python objects between ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import torch.distributed as dist

T = TypeVar("T")


def broadcast_from_rank0(find: Callable[[], T]) -> T:
    """What rank 0 finds: files may look otherwise to others, and need not be read by all."""
    told = [find() if not dist.is_initialized() or dist.get_rank() == 0 else None]
    if dist.is_initialized():
        dist.broadcast_object_list(told, src=0)
    return cast(T, told[0])

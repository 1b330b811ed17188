"""Copies of a rank's state in CPU memory, which later steps cannot change."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from phalanx.parallel.comm.pinned_memory import pinned_zeros
from phalanx.parallel.dtensor_shards import as_dtensor, local_tensor


class HostCopies:
    """Copies of tensors; those of GPU tensors are in page-locked memory, which each save reuses."""

    def __init__(self) -> None:
        self._pinned: dict[str, Tensor] = {}
        self._copied: torch.cuda.Event | None = None

    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return copies of this rank's shards, which are complete after `wait` and valid until the next call.

        The copies of GPU tensors are queued on the current stream, which is that of the optimizer. Later work on the
        stream finds the tensors copied, and the host does not block."""
        copies: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            local = local_tensor(tensor)
            if local.is_cuda:
                pinned = self._pinned.get(name)
                if pinned is None or pinned.shape != local.shape or pinned.dtype != local.dtype:
                    pinned = self._pinned[name] = pinned_zeros(local.shape, local.dtype)
                copied = pinned.copy_(local, non_blocking=True)
            else:
                copied = local.to("cpu", copy=True)
            if isinstance(tensor, DTensor):
                copied = as_dtensor(copied, tensor.device_mesh, tensor.placements, tensor.shape)
            copies[name] = copied
        if self._pinned:
            self._copied = torch.cuda.Event(blocking=True)
            self._copied.record()
        return copies

    def wait(self) -> None:
        """Wait until the last copies are complete; any thread of the same device may call it."""
        if self._copied is not None:
            self._copied.synchronize()

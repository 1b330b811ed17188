"""CPU memory that a GPU copies to and from while the host goes on."""

from __future__ import annotations

import mmap
from collections.abc import Callable

import torch
from torch import Tensor


class _PinnedMemory(mmap.mmap):
    """Memory that CUDA has page-locked; it is released with the last tensor that lies in it."""

    address: int
    unregister: Callable[[int], object] | None = None
    """Kept here, since modules may be gone when the process ends."""

    def __del__(self) -> None:
        if self.unregister is not None:
            self.unregister(self.address)


def pinned_zeros(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return zeros in page-locked memory of just their size: PyTorch rounds its own up to a power of two.

    Raises torch.cuda.CudaError if CUDA cannot lock so much.
    """
    if not shape.numel():
        return torch.zeros(shape, dtype=dtype)
    size_bytes = shape.numel() * dtype.itemsize
    memory = _PinnedMemory(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    tensor = torch.frombuffer(memory, dtype=dtype)
    runtime = torch.cuda.cudart()
    torch.cuda.check_error(runtime.cudaHostRegister(tensor.data_ptr(), size_bytes, 0))
    memory.address, memory.unregister = tensor.data_ptr(), runtime.cudaHostUnregister
    return tensor.view(shape)

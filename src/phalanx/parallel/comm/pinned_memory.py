"""CPU memory that a GPU copies to and from while the host goes on."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache

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

    If CUDA refuses to lock so much (RLIMIT_MEMLOCK, WSL), the memory is pageable, and the first time a line says so.
    Copies to and from it are right, but the host waits for them.
    """
    if not shape.numel():
        return torch.zeros(shape, dtype=dtype)
    size_bytes = shape.numel() * dtype.itemsize
    memory = _PinnedMemory(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    tensor = torch.frombuffer(memory, dtype=dtype)
    runtime = torch.cuda.cudart()
    try:
        torch.cuda.check_error(runtime.cudaHostRegister(tensor.data_ptr(), size_bytes, 0))
        memory.address, memory.unregister = tensor.data_ptr(), runtime.cudaHostUnregister
    except torch.cuda.CudaError as error:
        _clear_pending_error()
        _warn_once(str(error))
    return tensor.view(shape)


def _clear_pending_error() -> None:
    """Launch a kernel for nothing. CUDA reports a call that failed once more at this thread's next launch, where
    PyTorch would take it for the launch's error."""
    with suppress(RuntimeError):
        torch.ones(1, device="cuda")


@lru_cache(maxsize=1)
def _warn_once(error: str) -> None:
    reason = " ".join(error.split())
    print(
        f"phalanx: CUDA cannot lock memory ({reason}); copies to it are slower. Try ulimit -l unlimited.",
        file=sys.stderr,
    )

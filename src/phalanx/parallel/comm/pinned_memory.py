"""CPU memory that a GPU copies to and from while the host goes on."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache

import torch
from torch import Tensor


class PinnedMemory(mmap.mmap):
    """A mapping that CUDA page-locks; it is unlocked and unmapped with the last tensor in it.

    If CUDA refuses to lock so much (RLIMIT_MEMLOCK, WSL), the memory is pageable, and the first time a line says so.
    Copies to and from it are right, but the host waits for them.
    """

    _unregister: Callable[[int], object] | None = None
    """Kept here, since modules may be gone when the process ends."""

    def __init__(self, *_: object, **__: object) -> None:
        """Lock the mapping, which mmap's `__new__` has made of the same arguments."""
        self._address = torch.frombuffer(self, dtype=torch.uint8).data_ptr()
        runtime = torch.cuda.cudart()
        try:
            torch.cuda.check_error(runtime.cudaHostRegister(self._address, len(self), 0))
            self._unregister = runtime.cudaHostUnregister
        except torch.cuda.CudaError as error:
            _clear_pending_error()
            _warn_once(str(error))

    def __del__(self) -> None:
        if self._unregister is not None:
            self._unregister(self._address)


def pinned_zeros(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return zeros in PinnedMemory of just their size: PyTorch rounds its own up to a power of two."""
    if not shape.numel():
        return torch.zeros(shape, dtype=dtype)
    memory = PinnedMemory(-1, shape.numel() * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


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

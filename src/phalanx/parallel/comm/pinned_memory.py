"""Pinned CPU memory, for GPU copies that do not block the host."""

from __future__ import annotations

import logging
import mmap
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache

import torch
from torch import Tensor

logger = logging.getLogger(__name__)


class PinnedMemory(mmap.mmap):
    """A mapping that CUDA page-locks; it is unlocked and unmapped with its last tensor.

    If CUDA cannot lock the memory (RLIMIT_MEMLOCK, WSL), it is pageable, and a warning is printed once. Copies to and
    from it are correct, but block the host."""

    _unregister: Callable[[int], object] | None = None
    """A reference on the instance, because modules may be unloaded at exit."""

    def __init__(self, *_: object, **__: object) -> None:
        """Lock the mapping, which mmap's `__new__` has created from the same arguments."""
        self._address = torch.frombuffer(self, dtype=torch.uint8).data_ptr()
        runtime = torch.cuda.cudart()
        try:
            torch.cuda.check_error(runtime.cudaHostRegister(self._address, len(self), 0))
            self._unregister = runtime.cudaHostUnregister
        except torch.cuda.CudaError as error:
            # CUDA reports a failed call again at this thread's next launch, here of a no-op kernel. PyTorch would
            # otherwise report it as an error of a later launch.
            with suppress(RuntimeError):
                torch.ones(1, device="cuda")
            _warn_once(str(error))

    def __del__(self) -> None:
        if self._unregister is not None:
            self._unregister(self._address)


def pinned_zeros(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return zeros in PinnedMemory of their exact size: PyTorch rounds its own up to a power of two."""
    if not shape.numel():
        return torch.zeros(shape, dtype=dtype)
    memory = PinnedMemory(-1, shape.numel() * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


@lru_cache(maxsize=1)
def _warn_once(error: str) -> None:
    problem = f"CUDA cannot lock memory ({' '.join(error.split())}); copies to it are slower"
    logger.warning("%s. Try ulimit -l unlimited.", problem)

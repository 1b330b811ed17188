"""Offload: trained parameters, gradients and optimizer state are stored and stepped off the device.

Storage is CPU memory (ZeRO-Offload, arXiv 2101.06840), or memory-mapped files on a local disk (ZeRO-Infinity, arXiv
2104.07857). On disk they are stepped piece by piece. While a piece is stepped, the next is read and the previous is
written. Three pieces are in memory at a time, however large the state is.

Why: `docs/design/decisions/offload-mapping.md`."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from phalanx.parallel.comm.pinned_memory import pinned_zeros
from phalanx.parallel.dtensor_shards import as_dtensor, local_tensor
from phalanx.spec.errors import UserError
from phalanx.spec.layout import Layout
from phalanx.spec.malloc_tuning import tune_malloc
from phalanx.spec.open_files import raise_open_files_limit

MADV_POPULATE_READ = 22  # Linux 5.14; Python has no name for it
MMAP_THRESHOLD_BYTES = 2**20
NUM_WRITERS = 4
"""Number of concurrent file writers: each waits for the disk more than it works."""
MIN_OFFLOAD_BYTES = 2**16
"""Minimum size of a tensor on disk; norms and biases are many and small, and stay in memory."""


class CpuOffload:
    """Offload to CPU memory, pinned if a GPU copies from it."""

    def to_host(self, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor in the offload storage; zeros for a tensor without memory."""
        host_copy = self._allocate_like(tensor)
        return host_copy if tensor.is_meta else host_copy.copy_(tensor)

    def _allocate_like(self, like: Tensor) -> Tensor:
        if torch.cuda.is_available():
            return pinned_zeros(like.shape, like.dtype)
        return torch.zeros_like(like, device="cpu")

    def release(self, tensor: Tensor) -> None:
        """Free the storage of an unused tensor that `to_host` returned."""

    def write_back(self, tensors: Sequence[Tensor]) -> None:
        """Start to write tensors that were changed outside `stepping` to their storage."""

    def zeros_like(self, parameter: Tensor) -> Tensor:
        """Return initial optimizer state of an offloaded parameter."""
        return _wrap_like(parameter, self._allocate_like(local_tensor(parameter)))

    @contextmanager
    def stepping(
        self,
        index: int,
        optimizers: Sequence[torch.optim.Optimizer],
        parameters: Sequence[nn.Parameter],
        gradients: Sequence[Tensor | None],
    ) -> Iterator[None]:
        """Wrap the optimizer step of one piece of the parameters. A piece keeps its index from step to step.

        The optimizers create the state of the piece. `gradients` lists those in the offload storage; it is empty, or
        has None, where gradients are elsewhere."""
        yield


class DiskOffload(CpuOffload):
    """Offload to unnamed files in a directory, which vanish with the process, however it exits."""

    def __init__(self, directory: Path) -> None:
        """Prepare the offload; raises UserError if the directory does not accept files."""
        self.directory = directory
        self.files: dict[int, MappedFile] = {}
        """Files by the address of their tensor."""
        self.pieces: dict[int, list[MappedFile]] = {}
        self._reader = ThreadPoolExecutor(1)
        self._writer = ThreadPoolExecutor(NUM_WRITERS)
        self._pending_writes: list[Future[None]] = []
        # Revert the launcher's tuning for speed: memory is scarce here.
        tune_malloc(MMAP_THRESHOLD_BYTES, mmap_threshold_bytes=MMAP_THRESHOLD_BYTES)
        # Each tensor has a file with two descriptors, because the memory map has its own.
        raise_open_files_limit()

    @contextmanager
    def stepping(
        self,
        index: int,
        optimizers: Sequence[torch.optim.Optimizer],
        parameters: Sequence[nn.Parameter],
        gradients: Sequence[Tensor | None],
    ) -> Iterator[None]:
        """Read the next piece during the step of a piece, and write the piece afterwards."""
        self._reader.submit(_read_all, self.pieces.get(index + 1, []))
        yield
        if index not in self.pieces:
            self.pieces[index] = self._move_new_state_to_disk(optimizers, parameters, gradients)
        self._start_writes(self.pieces[index])

    def release(self, tensor: Tensor) -> None:
        """Drop the file of a tensor; its blocks are freed after pending writes."""
        self.files.pop(tensor.data_ptr(), None)

    def write_back(self, tensors: Sequence[Tensor]) -> None:
        """Start to write the files of these tensors."""
        self._start_writes(self._find_mapped_files(tensors))

    def _start_writes(self, files: Sequence[MappedFile]) -> None:
        """Wait for the previous writes, then start to write these files. Waiting bounds the memory."""
        writing = [self._writer.submit(file.write) for file in files]
        for previous in self._pending_writes:
            previous.result()
        self._pending_writes = writing

    def _move_new_state_to_disk(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        parameters: Sequence[nn.Parameter],
        gradients: Sequence[Tensor | None],
    ) -> list[MappedFile]:
        """Move the state that optimizers created at their first step to disk; return these parameters' files."""
        tensors = [*parameters, *(gradient for gradient in gradients if gradient is not None)]
        for parameter in parameters:
            for optimizer in optimizers:
                state = optimizer.state.get(parameter, {})
                for key, value in state.items():
                    if isinstance(value, Tensor) and value.shape == parameter.shape:
                        if local_tensor(value).data_ptr() not in self.files:
                            state[key] = _wrap_like(value, self.to_host(local_tensor(value)))
                        tensors.append(state[key])
        return self._find_mapped_files(tensors)

    def _find_mapped_files(self, tensors: Sequence[Tensor]) -> list[MappedFile]:
        files = [self.files.get(local_tensor(tensor).data_ptr()) for tensor in tensors]
        return [file for file in files if file is not None]

    def _allocate_like(self, like: Tensor) -> Tensor:
        if like.numel() * like.element_size() < MIN_OFFLOAD_BYTES:
            return super()._allocate_like(like)
        file = MappedFile(self.directory, like)
        self.files[file.tensor.data_ptr()] = file
        return file.tensor


class MappedFile:
    """A tensor whose memory is a memory-mapped file."""

    def __init__(self, directory: Path, like: Tensor) -> None:
        """Create zeros of the shape and dtype of `like`; raises UserError if the disk is full."""
        size = like.numel() * like.element_size()
        try:
            self.file = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115
            # Allocate the file now: a mapped file that cannot grow later kills its process.
            os.posix_fallocate(self.file.fileno(), 0, size)
        except OSError as error:
            problem, fix = _describe_disk_error(directory, size, error)
            raise UserError("layout.offload_directory", str(directory), problem, fix) from error
        self.memory = mmap.mmap(self.file.fileno(), size)
        self.tensor = torch.frombuffer(self.memory, dtype=like.dtype).view(like.shape)

    def read(self) -> None:
        """Read the full file, so that no access waits for a page."""
        address = ctypes.c_void_p(self.tensor.data_ptr())
        size = ctypes.c_size_t(len(self.memory))
        # The `madvise` of the mmap module would hold the GIL.
        if ctypes.CDLL(None).madvise(address, size, MADV_POPULATE_READ):
            self.memory.madvise(mmap.MADV_WILLNEED)

    def write(self) -> None:
        """Write the changed pages, and release their memory."""
        os.fdatasync(self.file.fileno())
        self.memory.madvise(mmap.MADV_DONTNEED)
        os.posix_fadvise(self.file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _read_all(files: Sequence[MappedFile]) -> None:
    for file in files:
        file.read()


def _describe_disk_error(directory: Path, size: int, error: OSError) -> tuple[str, str]:
    """Return problem and fix of an error at the allocation of a file of `size` bytes."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        free = shutil.disk_usage(directory).free
        problem = f"has no space for another {size / 1e9:.3f} GB of optimizer state ({free / 1e9:.3f} GB free)"
        return problem, "free space, or choose a directory on another disk; the last checkpoint is valid"
    if error.errno in (errno.EMFILE, errno.ENFILE):
        problem = "requires more open files than the limit of this process"
        return problem, "raise the hard limit of open files (ulimit -Hn)"
    return f"cannot be written: {error.strerror}", "choose a writable directory on a local disk"


def _wrap_like(tensor: Tensor, local: Tensor) -> Tensor:
    """Return `local` as this rank's shard of a tensor with the sharding of `tensor`."""
    if not isinstance(tensor, DTensor):
        return local
    return as_dtensor(local, tensor.device_mesh, tensor.placements, tensor.shape)


def build_offload(layout: Layout) -> CpuOffload | None:
    """Return the offload of a layout; None if its state stays on the device."""
    if layout.offload == "none":
        return None
    return CpuOffload() if layout.offload == "cpu" else DiskOffload(Path(str(layout.offload_directory)))

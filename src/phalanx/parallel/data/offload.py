"""Offload: what is trained, its gradients and its optimizer state rest outside the device and are stepped there.

To CPU memory (ZeRO-Offload, arXiv 2101.06840), or to files on a local disk (ZeRO-Infinity, arXiv 2104.07857), mapped
into memory. On disk they are stepped piece by piece: while one is stepped, the next is read and the one before is
written, so that three pieces are in memory at a time, however large the state is."""

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
from phalanx.parallel.dtensor_shards import as_dtensor
from phalanx.spec.errors import UserError
from phalanx.spec.malloc_tuning import tune_malloc
from phalanx.spec.open_files import raise_open_files_limit

MADV_POPULATE_READ = 22  # Linux 5.14; Python has no name for it
MMAP_THRESHOLD_BYTES = 2**20
NUM_WRITERS = 4
"""Files that are written at once: each waits for the disk more than it works."""
MIN_OFFLOAD_BYTES = 2**16
"""Tensors below this stay in memory: norms and biases are many and weigh nothing."""


class CpuOffload:
    """To CPU memory, pinned where a GPU copies from it."""

    piece_bytes = 256 * 2**20
    """What is trained, stepped at once."""

    def to_host(self, tensor: Tensor) -> Tensor:
        """A copy of a tensor in the place where it rests; of one without memory, zeros."""
        host_copy = self._allocate_like(tensor)
        return host_copy if tensor.is_meta else host_copy.copy_(tensor)

    def _allocate_like(self, like: Tensor) -> Tensor:
        if torch.cuda.is_available():
            return pinned_zeros(like.shape, like.dtype)
        return torch.zeros_like(like, device="cpu")

    def write_back(self, tensors: Sequence[Tensor]) -> None:
        """Begin to bring back to where they rest tensors that were changed outside `piece`."""

    def zeros_like(self, parameter: Tensor) -> Tensor:
        """Optimizer state of a parameter that rests here, not stepped yet."""
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        return _wrap_like(parameter, self._allocate_like(local))

    @contextmanager
    def stepping(
        self,
        index: int,
        optimizers: Sequence[torch.optim.Optimizer],
        parameters: Sequence[nn.Parameter],
        gradients: Sequence[Tensor | None],
    ) -> Iterator[None]:
        """Around the step of a piece; the same piece has the same `index` at every step."""
        yield


class DiskOffload(CpuOffload):
    """To unnamed files in a directory: they vanish with the process, however it ends."""

    piece_bytes = 16 * 2**20

    def __init__(self, directory: Path) -> None:
        """Raises UserError if files cannot be made there."""
        self.directory = directory
        self.files: dict[int, MappedFile] = {}
        """By the address of their tensor."""
        self.pieces: dict[int, list[MappedFile]] = {}
        self._reader = ThreadPoolExecutor(1)
        self._writer = ThreadPoolExecutor(NUM_WRITERS)
        self._pending_writes: list[Future[None]] = []
        # What the launcher has for speed is undone: memory is what is short here.
        tune_malloc(MMAP_THRESHOLD_BYTES, mmap_threshold_bytes=MMAP_THRESHOLD_BYTES)
        raise_open_files_limit()  # each tensor has a file with two descriptors (the map's is its own)

    @contextmanager
    def stepping(
        self,
        index: int,
        optimizers: Sequence[torch.optim.Optimizer],
        parameters: Sequence[nn.Parameter],
        gradients: Sequence[Tensor | None],
    ) -> Iterator[None]:
        self._reader.submit(_read_all, self.pieces.get(index + 1, []))
        yield
        if index not in self.pieces:
            self.pieces[index] = self._move_new_state_to_disk(optimizers, parameters, gradients)
        self._write(self.pieces[index])

    def write_back(self, tensors: Sequence[Tensor]) -> None:
        self._write(self._mapped_files(tensors))

    def _write(self, files: Sequence[MappedFile]) -> None:
        """Begin to write files; waits for those before them, so that what is in memory stays bounded."""
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
        """Put on disk the state that optimizers made in memory at their first step; the files of these parameters."""
        tensors = [*parameters, *(gradient for gradient in gradients if gradient is not None)]
        for parameter in parameters:
            for optimizer in optimizers:
                state = optimizer.state.get(parameter, {})
                for key, value in state.items():
                    if isinstance(value, Tensor) and value.shape == parameter.shape:
                        if _local_tensor(value).data_ptr() not in self.files:
                            state[key] = _wrap_like(value, self.to_host(_local_tensor(value)))
                        tensors.append(state[key])
        return self._mapped_files(tensors)

    def _mapped_files(self, tensors: Sequence[Tensor]) -> list[MappedFile]:
        files = [self.files.get(_local_tensor(tensor).data_ptr()) for tensor in tensors]
        return [file for file in files if file is not None]

    def _allocate_like(self, like: Tensor) -> Tensor:
        if like.numel() * like.element_size() < MIN_OFFLOAD_BYTES:
            return super()._allocate_like(like)
        file = MappedFile(self.directory, like)
        self.files[file.tensor.data_ptr()] = file
        return file.tensor


class MappedFile:
    """A tensor whose memory is a file's."""

    def __init__(self, directory: Path, like: Tensor) -> None:
        """Zeros of the shape and type of `like`. Raises UserError if the disk has no room for them."""
        size = like.numel() * like.element_size()
        try:
            self.file = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115
            os.posix_fallocate(self.file.fileno(), 0, size)  # a mapped file that cannot grow later kills its process
        except OSError as error:
            raise UserError(
                "layout.offload_directory", str(directory), *_disk_full_error(directory, size, error)
            ) from error
        self.memory = mmap.mmap(self.file.fileno(), size)
        self.tensor = torch.frombuffer(self.memory, dtype=like.dtype).view(like.shape)

    def read(self) -> None:
        """Read all of it, so that nobody waits for a page of it."""
        address = ctypes.c_void_p(self.tensor.data_ptr())
        size = ctypes.c_size_t(len(self.memory))
        if ctypes.CDLL(None).madvise(address, size, MADV_POPULATE_READ):  # the mmap module's would hold the GIL
            self.memory.madvise(mmap.MADV_WILLNEED)

    def write(self) -> None:
        """Write what has changed, and give its memory back."""
        os.fdatasync(self.file.fileno())
        self.memory.madvise(mmap.MADV_DONTNEED)
        os.posix_fadvise(self.file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _read_all(files: Sequence[MappedFile]) -> None:
    for file in files:
        file.read()


def _disk_full_error(directory: Path, size: int, error: OSError) -> tuple[str, str]:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        free = shutil.disk_usage(directory).free
        problem = f"has no room for {size / 1e9:.3f} GB of optimizer state more ({free / 1e9:.3f} GB are free)"
        return problem, "free space, or name a directory on another disk; the last checkpoint stands"
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return "needs more open files than this process may have", "raise the hard limit of open files (ulimit -Hn)"
    return f"cannot be written: {error.strerror}", "name a directory on a local disk that can be written"


def _local_tensor(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _wrap_like(tensor: Tensor, local: Tensor) -> Tensor:
    """`local` as this rank's part of a tensor that is split as `tensor` is."""
    if not isinstance(tensor, DTensor):
        return local
    return as_dtensor(local, tensor.device_mesh, tensor.placements, shape=tensor.shape)

"""Places for copies of ranks' states, in memory of the launcher that started them. It has no name and belongs to the
launcher (memfd_create): it is gone when that has ended, however it ends."""

from __future__ import annotations

import json
import mmap
import os
import struct
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SLOTS_ENV = "PHALANX_COPIES"
"""Names to ranks the launcher's process, and its memory: four places of each of its ranks, one rank after the other."""
LOCAL_SLOTS = (0, 1)
NEIGHBOR_SLOTS = (2, 3)
"""Two places of each kind, in turn: while one is written the other is whole."""
HEADER = struct.Struct("<qqq")
"""The step, -1 while the copy is not whole; the rank whose state it is; and the length of what describes it."""


def allocate_slots(num_ranks: int) -> None:
    """Give the ranks that this process is about to start places for their copies. They take memory when written."""
    fds = [os.memfd_create(f"phalanx-copy-{index}") for index in range(len(LOCAL_SLOTS + NEIGHBOR_SLOTS) * num_ranks)]
    os.environ[SLOTS_ENV] = f"{os.getpid()}:{','.join(map(str, fds))}"


class SharedMemorySlot:
    """A copy in memory of the launcher."""

    def __init__(self, path: Path, mapping: type[mmap.mmap] = mmap.mmap) -> None:
        """`mapping` is the kind of memory that the file is mapped as."""
        self._file = path.open("r+b", buffering=0)
        self._mapping = mapping
        self._map: mmap.mmap | None = None

    def ensure_size(self, size: int) -> None:
        """Have room for so many bytes."""
        if os.fstat(self._file.fileno()).st_size < size:
            self._map = None
            self._file.truncate(size)

    @property
    def memory(self) -> mmap.mmap:
        """All of it."""
        if self._map is None:
            self._map = self._mapping(self._file.fileno(), 0)
        return self._map

    @property
    def header(self) -> tuple[int, int, int]:
        """The step, the rank and the length of the description of a whole copy; a step of -1 where there is none."""
        empty = os.fstat(self._file.fileno()).st_size < HEADER.size
        return (-1, 0, 0) if empty else HEADER.unpack_from(self.memory)

    def invalidate(self) -> None:
        """Say that what is here is not whole."""
        self.ensure_size(HEADER.size)
        HEADER.pack_into(self.memory, 0, -1, 0, 0)

    def commit(self, step: int, rank: int, metadata_length: int) -> None:
        """Say that it is."""
        HEADER.pack_into(self.memory, 0, step, rank, metadata_length)

    def bytes(self) -> Tensor:
        """Of the copy, behind its header, as a tensor of the same memory."""
        return torch.frombuffer(self.memory, dtype=torch.uint8, offset=HEADER.size)

    def metadata(self, length: int) -> dict[str, Any]:
        """What the copy says of itself."""
        return dict(json.loads(self.memory[HEADER.size : HEADER.size + length]))

"""Memory slots for copies of ranks' states, in the launcher that started the ranks.

The memory is anonymous and belongs to the launcher (memfd_create). It is freed when the launcher exits, for whatever
reason.
"""

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
"""Variable with the launcher's process id and its memory file: four slots per rank, one rank after the other."""
LOCAL_SLOTS = (0, 1)
NEIGHBOR_SLOTS = (2, 3)
"""Two slots of each kind, used alternately: while one is written the other is complete."""
HEADER = struct.Struct("<qqq")
"""Step (-1 while the copy is incomplete), rank of the copied state, and length of the metadata."""


def allocate_slots(num_ranks: int) -> None:
    """Allocate slots for the copies of the ranks that this process is about to start.

    They occupy memory only once written.
    """
    fds = [os.memfd_create(f"phalanx-copy-{index}") for index in range(len(LOCAL_SLOTS + NEIGHBOR_SLOTS) * num_ranks)]
    os.environ[SLOTS_ENV] = f"{os.getpid()}:{','.join(map(str, fds))}"


class SharedMemorySlot:
    """A slot for one copy in the launcher's memory."""

    def __init__(self, path: Path, mapping: type[mmap.mmap] = mmap.mmap) -> None:
        """Open the slot; `mapping` is the kind of memory map."""
        self._file = path.open("r+b", buffering=0)
        self._mapping = mapping
        self._map: mmap.mmap | None = None

    def ensure_size(self, size: int) -> None:
        """Grow the file to at least `size` bytes."""
        if os.fstat(self._file.fileno()).st_size < size:
            self._map = None
            self._file.truncate(size)

    @property
    def memory(self) -> mmap.mmap:
        """Memory map of the full slot."""
        if self._map is None:
            self._map = self._mapping(self._file.fileno(), 0)
        return self._map

    @property
    def header(self) -> tuple[int, int, int]:
        """Step, rank and metadata length of a complete copy; the step is -1 if there is none."""
        empty = os.fstat(self._file.fileno()).st_size < HEADER.size
        return (-1, 0, 0) if empty else HEADER.unpack_from(self.memory)

    def invalidate(self) -> None:
        """Mark the copy as incomplete."""
        self.ensure_size(HEADER.size)
        HEADER.pack_into(self.memory, 0, -1, 0, 0)

    def commit(self, step: int, rank: int, metadata_length: int) -> None:
        """Mark the copy as complete.

        Args:
            step: Step after which the state was copied.
            rank: Rank whose state was copied.
            metadata_length: Bytes of the metadata at the start of the content.
        """
        HEADER.pack_into(self.memory, 0, step, rank, metadata_length)

    def bytes(self) -> Tensor:
        """Return the content of the copy, after its header, as a tensor that shares the memory."""
        return torch.frombuffer(self.memory, dtype=torch.uint8, offset=HEADER.size)

    def metadata(self, length: int) -> dict[str, Any]:
        """Return the metadata of the copy."""
        return dict(json.loads(self.memory[HEADER.size : HEADER.size + length]))

"""Memory slots for copies of ranks' states, in the launcher that started the ranks.

The memory is anonymous and belongs to the launcher (memfd_create). It is freed when the launcher exits, for whatever
reason.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SLOTS_ENV = "PHALANX_COPIES"
"""Variable with the launcher's process id and its memory file: four slots per rank, one rank after the other."""
LOCAL_SLOTS = (0, 1)
NEIGHBOR_SLOTS = (2, 3)
"""Two slots of each kind, used alternately: while one is written the other is complete."""
_HEADER_FORMAT = struct.Struct("<qqq")
HEADER_BYTES = _HEADER_FORMAT.size


@dataclass(frozen=True)
class SlotHeader:
    """The first bytes of a slot: three integers, in the order of these fields."""

    step: int = -1
    """Step after which the state was copied; -1 if the slot has no complete copy."""
    rank: int = 0
    """Rank whose state was copied."""
    metadata_bytes: int = 0
    """Size of the metadata (JSON), which follows the header."""

    @property
    def is_complete(self) -> bool:
        """True if the slot has a complete copy."""
        return self.step >= 0

    @property
    def copy_id(self) -> tuple[int, int]:
        """Step and rank of the copy."""
        return self.step, self.rank


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
    def header(self) -> SlotHeader:
        """The header of the copy; that of an incomplete copy if the slot is empty."""
        if os.fstat(self._file.fileno()).st_size < HEADER_BYTES:
            return SlotHeader()
        return SlotHeader(*_HEADER_FORMAT.unpack_from(self.memory))

    def invalidate(self) -> None:
        """Mark the copy as incomplete."""
        self.ensure_size(HEADER_BYTES)
        self.commit(SlotHeader())

    def commit(self, header: SlotHeader) -> None:
        """Mark the copy as complete: write its header."""
        _HEADER_FORMAT.pack_into(self.memory, 0, *astuple(header))

    def bytes(self) -> Tensor:
        """Return the content of the copy, after its header, as a tensor that shares the memory."""
        return torch.frombuffer(self.memory, dtype=torch.uint8, offset=HEADER_BYTES)

    def metadata(self) -> dict[str, Any]:
        """Return the metadata of a complete copy."""
        return dict(json.loads(self.memory[HEADER_BYTES : HEADER_BYTES + self.header.metadata_bytes]))


class SlotPair:
    """Two slots for copies of one rank, used alternately: while `next` is written, `current` is complete."""

    def __init__(self, first: SharedMemorySlot, second: SharedMemorySlot) -> None:
        self.slots = (first, second)
        self._next_index = 0

    @property
    def current(self) -> SharedMemorySlot:
        """The slot with the newest complete copy, if there is any."""
        return self.slots[1 - self._next_index]

    @property
    def next(self) -> SharedMemorySlot:
        """The slot that the next copy overwrites."""
        return self.slots[self._next_index]

    def flip(self) -> None:
        """Make the slot that was written the current one."""
        self._next_index = 1 - self._next_index

    def make_current(self, index: int) -> None:
        """Make the first (0) or the second slot (1) current, so that the next copy overwrites the other."""
        self._next_index = 1 - index

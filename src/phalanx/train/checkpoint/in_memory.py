"""In-memory copies of a run's state, in the launcher of each rank and in that of the next node.

The state of a failed rank survives in its launcher, the state of a failed node in the neighbor node. (Gemini, SOSP
2023, keeps checkpoints in the memory of other machines in this way.)"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.launch.shared_memory import HEADER, LOCAL_SLOTS, NEIGHBOR_SLOTS, SLOTS_ENV, SharedMemorySlot
from phalanx.parallel.comm.host_copy import wait_for_host_copies
from phalanx.parallel.comm.objects import all_gather_objects
from phalanx.parallel.comm.pinned_memory import PinnedMemory
from phalanx.parallel.dtensor_shards import local_tensor
from phalanx.spec.errors import UserError

ALIGNMENT_BYTES = 64


@dataclass(frozen=True)
class InMemoryCheckpoint:
    """A rank's part of a copy of the state of all ranks."""

    step: int
    manifest: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    """Shapes of full tensors."""
    tensors: dict[str, Tensor]
    """Shards of this rank."""


class InMemoryCheckpointer:
    """Access of this rank to the copies in its launcher; raises UserError without a launcher's memory."""

    def __init__(self, identity: Mapping[str, Any], group: dist.ProcessGroup | None, device: torch.device) -> None:
        """Map this rank's slots.

        Args:
            identity: Identity of the state; only a copy with an equal identity is restored.
            group: Process group that exchanges copies in CPU memory.
            device: Device of this rank. Its local slots are page-locked if that is a GPU.
        """
        slots_text = os.environ.get(SLOTS_ENV)
        if slots_text is None:
            fix = "start the run with phalanx train, or set recovery.in_memory_checkpoint_every = 0"
            raise UserError(
                "recovery.in_memory_checkpoint_every", None, "requires a launcher that stores the copies", fix=fix
            )
        launcher_pid, _, fds = slots_text.partition(":")
        first = int(os.environ["LOCAL_RANK"]) * len(LOCAL_SLOTS + NEIGHBOR_SLOTS)
        files = [Path(f"/proc/{launcher_pid}/fd/{fd}") for fd in fds.split(",")[first:]]
        local_mapping = PinnedMemory if device.type == "cuda" else mmap.mmap
        self._slots = [SharedMemorySlot(files[index], local_mapping) for index in LOCAL_SLOTS]
        self._slots += [SharedMemorySlot(files[index]) for index in NEIGHBOR_SLOTS]
        self._device = device
        self._identity = json.loads(json.dumps(identity))
        self._group = group
        self.rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        local_world_size = int(os.environ["LOCAL_WORLD_SIZE"])
        self._next_rank = (self.rank + local_world_size) % ranks
        self._previous_rank = (self.rank - local_world_size) % ranks
        self._slot_index = 0

    def save(self, step: int, tensors: Mapping[str, Tensor], manifest: Mapping[str, Any]) -> None:
        """Copy this rank's state after a step to its launcher and to the next node (a collective).

        Args:
            step: Step after which the state is copied.
            tensors: State by name; this rank's shards are copied.
            manifest: Values of the run at this step, as in a checkpoint's manifest (JSON-able).
        """
        local_slot, neighbor_slot = (self._slots[slots[self._slot_index]] for slots in (LOCAL_SLOTS, NEIGHBOR_SLOTS))
        self._slot_index = 1 - self._slot_index
        local_slot.invalidate()
        parts = {name: local_tensor(tensor) for name, tensor in tensors.items()}
        entries = {
            name: {"shape": list(part.shape), "whole": list(tensors[name].shape), "dtype": str(part.dtype)}
            for name, part in parts.items()
        }
        metadata = json.dumps({"identity": self._identity, "manifest": manifest, "tensors": entries}).encode()
        local_slot.ensure_size(
            HEADER.size + _align(len(metadata)) + sum(_align(part.nbytes) for part in parts.values())
        )
        local_slot.memory[HEADER.size : HEADER.size + len(metadata)] = metadata
        views = _tensor_views(
            local_slot.bytes()[_align(len(metadata)) :], [(part.shape, part.dtype) for part in parts.values()]
        )
        for view, part in zip(views, parts.values(), strict=True):
            view.copy_(part, non_blocking=True)
        wait_for_host_copies(self._device)
        local_slot.commit(step, self.rank, len(metadata))
        if self._next_rank != self.rank:
            neighbor_slot.invalidate()
            metadata_length = self._exchange_with_neighbors(
                local_slot, self._next_rank, neighbor_slot, source=self._previous_rank
            )
            neighbor_slot.commit(step, self._previous_rank, metadata_length)

    def _exchange_with_neighbors(
        self, local_slot: SharedMemorySlot, destination: int, neighbor_slot: SharedMemorySlot, source: int
    ) -> int:
        """Send a copy, and receive another; return the length of the metadata of the latter."""
        payload = local_slot.bytes()
        sizes = torch.tensor([payload.numel(), local_slot.header[2]])
        incoming_sizes = torch.zeros(2, dtype=torch.int64)
        _send_and_receive(sizes, destination, incoming_sizes, source=source, group=self._group)
        neighbor_slot.ensure_size(HEADER.size + int(incoming_sizes[0]))
        _send_and_receive(
            payload, destination, neighbor_slot.bytes()[: int(incoming_sizes[0])], source=source, group=self._group
        )
        return int(incoming_sizes[1])

    def load_latest(self) -> InMemoryCheckpoint | None:
        """Return the newest copy that is complete over all ranks, sent to its rank (a collective)."""
        local_copies = [slot.header[:2] for slot in self._slots if slot.header[0] >= 0 and self._matches_identity(slot)]
        latest = latest_common_step(all_gather_objects(local_copies, self._group))
        if latest is None:
            return None
        step, holders = latest
        # Other ranks may need these.
        needed_copies = {(step, rank) for rank, holder in enumerate(holders) if holder == self.rank}
        for rank, holder in enumerate(holders):
            if holder != rank and self.rank in (holder, rank):
                self._transfer(step, rank, holder, needed_copies=needed_copies)
        return self._read_slot(self._find_slot(step, self.rank))

    def _matches_identity(self, slot: SharedMemorySlot) -> bool:
        return bool(slot.metadata(slot.header[2])["identity"] == self._identity)

    def _find_slot(self, step: int, rank: int) -> SharedMemorySlot:
        return next(slot for slot in self._slots if slot.header[:2] == (step, rank))

    def _transfer(self, step: int, rank: int, holder: int, needed_copies: Collection[tuple[int, int]]) -> None:
        """Send a rank its state from its holder; the slots of `needed_copies` are not overwritten."""
        if self.rank == holder:
            slot = self._find_slot(step, rank)
            payload = slot.bytes()
            dist.send(torch.tensor([payload.numel(), slot.header[2]]), rank, group=self._group)
            dist.send(payload, rank, group=self._group)
            return
        sizes = torch.zeros(2, dtype=torch.int64)
        dist.recv(sizes, holder, group=self._group)
        slot = next(slot for slot in self._slots if slot.header[:2] not in needed_copies)
        slot.invalidate()
        slot.ensure_size(HEADER.size + int(sizes[0]))
        dist.recv(slot.bytes()[: int(sizes[0])], holder, group=self._group)
        slot.commit(step, rank, int(sizes[1]))

    def _read_slot(self, slot: SharedMemorySlot) -> InMemoryCheckpoint:
        step, _, length = slot.header
        metadata = slot.metadata(length)
        entries = metadata["tensors"]
        shapes_and_dtypes = [
            (torch.Size(entry["shape"]), getattr(torch, entry["dtype"].removeprefix("torch.")))
            for entry in entries.values()
        ]
        parts = _tensor_views(slot.bytes()[_align(length) :], shapes_and_dtypes)
        self._slot_index = 1 - LOCAL_SLOTS.index(self._slots.index(slot)) if slot in self._slots[:2] else 0
        shapes = {name: tuple(entry["whole"]) for name, entry in entries.items()}
        return InMemoryCheckpoint(step, metadata["manifest"], shapes, tensors=dict(zip(entries, parts, strict=True)))


def latest_common_step(copies_by_rank: Sequence[Sequence[tuple[int, int]]]) -> tuple[int, list[int]] | None:
    """Return the newest step whose copies exist for every rank, and the holder of each rank's copy.

    A rank itself is its preferred holder. `copies_by_rank` has the step and the rank of each copy on a rank."""
    ranks = len(copies_by_rank)
    for step in sorted({step for copies in copies_by_rank for step, _ in copies}, reverse=True):
        holders = [
            next((holder for holder in (rank, *range(ranks)) if (step, rank) in copies_by_rank[holder]), None)
            for rank in range(ranks)
        ]
        available = [holder for holder in holders if holder is not None]
        if len(available) == ranks:
            return step, available
    return None


def _align(size: int) -> int:
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _tensor_views(memory: Tensor, shapes_and_dtypes: Sequence[tuple[torch.Size, torch.dtype]]) -> Iterator[Tensor]:
    """Yield consecutive tensors of these shapes and dtypes in a memory buffer."""
    offset = 0
    for shape, dtype in shapes_and_dtypes:
        size = shape.numel() * dtype.itemsize
        yield memory[offset : offset + size].view(dtype).view(shape)
        offset += _align(size)


def _send_and_receive(
    sent: Tensor, destination: int, received: Tensor, source: int, group: dist.ProcessGroup | None
) -> None:
    """Send to one rank while receiving from another."""
    works = [dist.isend(sent, destination, group=group), dist.irecv(received, source, group=group)]
    for work in works:
        if work is not None:
            work.wait()

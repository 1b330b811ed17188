"""Copies of a run's state in memory: each rank's launcher and the launcher of the next node keep one.

The state of a failed rank survives in its launcher, the state of a failed node in the neighbor node. (Gemini, SOSP
2023, keeps checkpoints in the memory of other machines in this way.)"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.launch.shared_memory import (
    HEADER_BYTES,
    LOCAL_SLOTS,
    NEIGHBOR_SLOTS,
    SLOTS_ENV,
    SharedMemorySlot,
    SlotHeader,
    SlotPair,
)
from phalanx.parallel.comm.host_copy import wait_for_host_copies
from phalanx.parallel.comm.objects import all_gather_objects, rank_and_world_size
from phalanx.parallel.comm.pinned_memory import PinnedMemory
from phalanx.parallel.dtensor_shards import local_tensor
from phalanx.spec.errors import UserError

ALIGNMENT_BYTES = 64


@dataclass(frozen=True, kw_only=True)
class InMemoryCheckpoint:
    """One rank's part of a copy of the run's state."""

    step: int
    manifest: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    """Shapes of full tensors."""
    tensors: dict[str, Tensor]
    """Shards of this rank."""


@dataclass(frozen=True, kw_only=True)
class SavedTensor:
    """Shape and dtype of a shard in a slot."""

    shape: torch.Size
    full_shape: torch.Size
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the shard."""
        return self.shape.numel() * self.dtype.itemsize

    def to_json(self) -> dict[str, Any]:
        """Return the entry of the metadata."""
        return {"shape": list(self.shape), "full_shape": list(self.full_shape), "dtype": str(self.dtype)}

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> Self:
        """Return the description in an entry of the metadata."""
        dtype = getattr(torch, entry["dtype"].removeprefix("torch."))
        return cls(shape=torch.Size(entry["shape"]), full_shape=torch.Size(entry["full_shape"]), dtype=dtype)


class InMemoryCheckpointer:
    """Access of this rank to the copies in its launcher; raises UserError without a launcher's memory."""

    def __init__(self, identity: Mapping[str, Any], group: dist.ProcessGroup | None, device: torch.device) -> None:
        """Map this rank's slots, page-locked if `device` is a GPU.

        Only a copy with an equal `identity` is restored. `group` exchanges copies in CPU memory."""
        slots_text = os.environ.get(SLOTS_ENV)
        if slots_text is None:
            fix = "start the run with phalanx train, or set recovery.in_memory_checkpoint_every = 0"
            problem = "requires a launcher that stores the copies"
            raise UserError("recovery.in_memory_checkpoint_every", None, problem, fix)
        launcher_pid, _, fds = slots_text.partition(":")
        first = int(os.environ["LOCAL_RANK"]) * len(LOCAL_SLOTS + NEIGHBOR_SLOTS)
        files = [Path(f"/proc/{launcher_pid}/fd/{fd}") for fd in fds.split(",")[first:]]
        local_mapping = PinnedMemory if device.type == "cuda" else mmap.mmap
        self._slots = [SharedMemorySlot(files[index], local_mapping) for index in LOCAL_SLOTS]
        self._slots += [SharedMemorySlot(files[index]) for index in NEIGHBOR_SLOTS]
        self._local = SlotPair(*self._slots[:2])
        """Copies of this rank's state."""
        self._neighbor = SlotPair(*self._slots[2:])
        """Copies of the state of a rank of the previous node."""
        self._device = device
        self._identity = json.loads(json.dumps(identity))
        self._group = group
        self.rank, ranks = rank_and_world_size()
        local_world_size = int(os.environ["LOCAL_WORLD_SIZE"])
        self._next_rank = (self.rank + local_world_size) % ranks
        self._previous_rank = (self.rank - local_world_size) % ranks

    def save(self, step: int, tensors: Mapping[str, Tensor], manifest: Mapping[str, Any]) -> None:
        """Copy this rank's state after a step to its launcher and to the next node (a collective).

        This rank's shards are copied, and the values of a checkpoint's manifest (JSON-able)."""
        self._write_slot(step, self._local.next, tensors, manifest)
        self._local.flip()
        if self._next_rank != self.rank:
            self._exchange_with_neighbors(step)
        self._neighbor.flip()

    def _write_slot(
        self, step: int, slot: SharedMemorySlot, tensors: Mapping[str, Tensor], manifest: Mapping[str, Any]
    ) -> None:
        """Copy this rank's state to a slot: header, metadata, and one shard after the other."""
        slot.invalidate()
        shards = {name: local_tensor(tensor) for name, tensor in tensors.items()}
        entries = {
            name: SavedTensor(shape=shard.shape, full_shape=tensors[name].shape, dtype=shard.dtype)
            for name, shard in shards.items()
        }
        descriptions = {name: entry.to_json() for name, entry in entries.items()}
        metadata = json.dumps({"identity": self._identity, "manifest": manifest, "tensors": descriptions}).encode()
        shards_bytes = sum(_round_up_to_alignment(entry.nbytes) for entry in entries.values())
        slot.ensure_size(HEADER_BYTES + _round_up_to_alignment(len(metadata)) + shards_bytes)
        slot.memory[HEADER_BYTES : HEADER_BYTES + len(metadata)] = metadata
        buffer = slot.bytes()[_round_up_to_alignment(len(metadata)) :]
        for name, shard_copy in _shards_in_buffer(entries, buffer).items():
            shard_copy.copy_(shards[name], non_blocking=True)
        wait_for_host_copies(self._device)
        slot.commit(SlotHeader(step, self.rank, len(metadata)))

    def _exchange_with_neighbors(self, step: int) -> None:
        """Send the copy of this rank to the next node, and receive that of a rank of the previous node."""
        sent_slot = self._local.current
        received_slot = self._neighbor.next
        received_slot.invalidate()
        sent = sent_slot.bytes()
        sizes = torch.tensor([sent.numel(), sent_slot.header.metadata_bytes])
        received_sizes = torch.zeros(2, dtype=torch.int64)
        self._send_to_next_node(sizes, received_sizes)
        received_bytes, metadata_bytes = received_sizes.tolist()
        received_slot.ensure_size(HEADER_BYTES + received_bytes)
        self._send_to_next_node(sent, received_slot.bytes()[:received_bytes])
        received_slot.commit(SlotHeader(step, self._previous_rank, metadata_bytes))

    def _send_to_next_node(self, sent: Tensor, received: Tensor) -> None:
        """Send to the rank of the next node while receiving from that of the previous node."""
        works = [
            dist.isend(sent, self._next_rank, group=self._group),
            dist.irecv(received, self._previous_rank, group=self._group),
        ]
        for work in works:
            if work is not None:
                work.wait()

    def load_latest(self) -> InMemoryCheckpoint | None:
        """Return the newest copy that is complete over all ranks, sent to its rank (a collective)."""
        complete = [slot for slot in self._slots if slot.header.is_complete]
        local_copies = [slot.header.copy_id for slot in complete if slot.metadata()["identity"] == self._identity]
        latest = latest_common_step(all_gather_objects(local_copies, self._group))
        if latest is None:
            return None
        step, holders = latest
        # Other ranks may need these.
        needed_copies = {(step, rank) for rank, holder in enumerate(holders) if holder == self.rank}
        for rank, holder in enumerate(holders):
            if holder != rank and self.rank in (holder, rank):
                self._transfer_state(step, rank, holder, needed_copies)
        slot = self._find_slot(step, self.rank)
        metadata = slot.metadata()
        entries = {name: SavedTensor.from_json(entry) for name, entry in metadata["tensors"].items()}
        # The next copy must not overwrite the slot of the restored one.
        index = self._slots.index(slot) % 2
        self._local.make_current(index)
        self._neighbor.make_current(index)
        return InMemoryCheckpoint(
            step=slot.header.step,
            manifest=metadata["manifest"],
            shapes={name: tuple(entry.full_shape) for name, entry in entries.items()},
            tensors=_shards_in_buffer(entries, slot.bytes()[_round_up_to_alignment(slot.header.metadata_bytes) :]),
        )

    def _find_slot(self, step: int, rank: int) -> SharedMemorySlot:
        return next(slot for slot in self._slots if slot.header.copy_id == (step, rank))

    def _transfer_state(self, step: int, rank: int, holder: int, needed_copies: Collection[tuple[int, int]]) -> None:
        """Send a rank its state from its holder, without overwriting the slots of `needed_copies`."""
        if self.rank == holder:
            slot = self._find_slot(step, rank)
            payload = slot.bytes()
            dist.send(torch.tensor([payload.numel(), slot.header.metadata_bytes]), rank, group=self._group)
            dist.send(payload, rank, group=self._group)
            return
        sizes = torch.zeros(2, dtype=torch.int64)
        dist.recv(sizes, holder, group=self._group)
        received_bytes, metadata_bytes = sizes.tolist()
        slot = next(slot for slot in self._slots if slot.header.copy_id not in needed_copies)
        slot.invalidate()
        slot.ensure_size(HEADER_BYTES + received_bytes)
        dist.recv(slot.bytes()[:received_bytes], holder, group=self._group)
        slot.commit(SlotHeader(step, rank, metadata_bytes))


def latest_common_step(copies_by_rank: Sequence[Sequence[tuple[int, int]]]) -> tuple[int, list[int]] | None:
    """Return the newest step whose copies exist for every rank, and the holder of each rank's copy.

    A rank that still has its own copy is its holder. `copies_by_rank` lists, for each rank, the step and the owner of
    every copy that it holds."""
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


def _round_up_to_alignment(size: int) -> int:
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _shards_in_buffer(entries: Mapping[str, SavedTensor], buffer: Tensor) -> dict[str, Tensor]:
    """Return the shards that lie one after the other in a buffer, whose memory they share."""
    shards = {}
    offset = 0
    for name, entry in entries.items():
        shards[name] = buffer[offset : offset + entry.nbytes].view(entry.dtype).view(entry.shape)
        offset += _round_up_to_alignment(entry.nbytes)
    return shards

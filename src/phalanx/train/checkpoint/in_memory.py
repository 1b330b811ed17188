"""Copies of a run's state that outlive its ranks: in memory of the launcher that started each, and of the next node's.

A rank that dies takes nothing with it then that its launcher does not have, and a node that dies nothing that its
neighbour does not have (Gemini, SOSP 2023, keeps checkpoints in the memory of other machines so)."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.launch.shared_memory import HEADER, NEIGHBOUR_SLOTS, OWN_SLOTS, SLOTS_ENV, SharedMemorySlot
from phalanx.parallel.comm.objects import all_gather_objects
from phalanx.parallel.dtensor_shards import local_tensor
from phalanx.spec.errors import UserError

ALIGNED = 64


@dataclass(frozen=True)
class InMemoryCheckpoint:
    """A copy that every rank has of its own state."""

    step: int
    manifest: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    """Of whole tensors."""
    tensors: dict[str, Tensor]
    """This rank's parts of them."""


class InMemoryCheckpointer:
    """This rank's access to the copies of its launcher.

    Raises UserError where no launcher offers memory.
    """

    def __init__(self, identity: Mapping[str, Any], group: dist.ProcessGroup | None) -> None:
        """`identity` says of what the state is: only the same is restored. `group` exchanges copies in CPU memory."""
        offered = os.environ.get(SLOTS_ENV)
        if offered is None:
            fix = "start the run with phalanx train, or set it to 0"
            raise UserError("recovery.in_memory_checkpoint_every", None, "needs a launcher that keeps the copies", fix)
        process, _, numbers = offered.partition(":")
        first = int(os.environ["LOCAL_RANK"]) * len(OWN_SLOTS + NEIGHBOUR_SLOTS)
        mine = numbers.split(",")[first : first + len(OWN_SLOTS + NEIGHBOUR_SLOTS)]
        self._places = [SharedMemorySlot(Path(f"/proc/{process}/fd/{number}")) for number in mine]
        self._identity = json.loads(json.dumps(identity))
        self._group = group
        self.rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        on_node = int(os.environ["LOCAL_WORLD_SIZE"])
        self._next, self._before = (self.rank + on_node) % ranks, (self.rank - on_node) % ranks
        self._turn = 0

    def save(self, step: int, tensors: Mapping[str, Tensor], manifest: Mapping[str, Any]) -> None:
        """Copy this rank's state after a step, here and at the next node. A collective."""
        own, neighbours = (self._places[places[self._turn]] for places in (OWN_SLOTS, NEIGHBOUR_SLOTS))
        self._turn = 1 - self._turn
        own.invalidate()
        parts = {name: local_tensor(tensor) for name, tensor in tensors.items()}
        entries = {
            name: {"shape": list(part.shape), "whole": list(tensors[name].shape), "dtype": str(part.dtype)}
            for name, part in parts.items()
        }
        said = json.dumps({"identity": self._identity, "manifest": manifest, "tensors": entries}).encode()
        own.ensure_size(HEADER.size + _aligned(len(said)) + sum(_aligned(part.nbytes) for part in parts.values()))
        own.memory[HEADER.size : HEADER.size + len(said)] = said
        places = _tensor_views(
            own.bytes()[_aligned(len(said)) :], [(part.shape, part.dtype) for part in parts.values()]
        )
        for place, part in zip(places, parts.values(), strict=True):
            place.copy_(part)
        own.commit(step, self.rank, len(said))
        if self._next != self.rank:
            neighbours.invalidate()
            described = self._exchange_with_neighbours(own, self._next, neighbours, self._before)
            neighbours.commit(step, self._before, described)

    def _exchange_with_neighbours(self, mine: SharedMemorySlot, to: int, theirs: SharedMemorySlot, source: int) -> int:
        """Send a copy, and receive another; returns the length of what describes that."""
        body = mine.bytes()
        sizes, coming = torch.tensor([body.numel(), mine.header[2]]), torch.zeros(2, dtype=torch.int64)
        _send_and_receive(sizes, to, coming, source, self._group)
        theirs.ensure_size(HEADER.size + int(coming[0]))
        _send_and_receive(body, to, theirs.bytes()[: int(coming[0])], source, self._group)
        return int(coming[1])

    def load_latest(self) -> InMemoryCheckpoint | None:
        """The newest copy of which every rank's part is somewhere, brought to its rank. A collective."""
        mine = [place.header[:2] for place in self._places if place.header[0] >= 0 and self._matches_identity(place)]
        found = latest_common_step(all_gather_objects(mine, self._group))
        if found is None:
            return None
        step, holders = found
        kept = {(step, rank) for rank, holder in enumerate(holders) if holder == self.rank}  # which others may want
        for rank, holder in enumerate(holders):
            if holder != rank and self.rank in (holder, rank):
                self._transfer(step, rank, holder, kept)
        return self._read(self._place(step, self.rank))

    def _matches_identity(self, place: SharedMemorySlot) -> bool:
        return bool(place.metadata(place.header[2])["identity"] == self._identity)

    def _place(self, step: int, rank: int) -> SharedMemorySlot:
        return next(place for place in self._places if place.header[:2] == (step, rank))

    def _transfer(self, step: int, rank: int, holder: int, kept: Collection[tuple[int, int]]) -> None:
        """Send a rank its state from whoever holds it; what is `kept` here stays."""
        if self.rank == holder:
            place = self._place(step, rank)
            body = place.bytes()
            dist.send(torch.tensor([body.numel(), place.header[2]]), rank, group=self._group)
            dist.send(body, rank, group=self._group)
            return
        sizes = torch.zeros(2, dtype=torch.int64)
        dist.recv(sizes, holder, group=self._group)
        place = next(place for place in self._places if place.header[:2] not in kept)
        place.invalidate()
        place.ensure_size(HEADER.size + int(sizes[0]))
        dist.recv(place.bytes()[: int(sizes[0])], holder, group=self._group)
        place.commit(step, rank, int(sizes[1]))

    def _read(self, place: SharedMemorySlot) -> InMemoryCheckpoint:
        step, _, length = place.header
        said = place.metadata(length)
        entries = said["tensors"]
        kinds = [
            (torch.Size(entry["shape"]), getattr(torch, entry["dtype"].removeprefix("torch.")))
            for entry in entries.values()
        ]
        parts = _tensor_views(place.bytes()[_aligned(length) :], kinds)
        self._turn = 1 - OWN_SLOTS.index(self._places.index(place)) if place in self._places[:2] else 0
        shapes = {name: tuple(entry["whole"]) for name, entry in entries.items()}
        return InMemoryCheckpoint(step, said["manifest"], shapes, dict(zip(entries, parts, strict=True)))


def latest_common_step(told: Sequence[Sequence[tuple[int, int]]]) -> tuple[int, list[int]] | None:
    """The newest step of which somebody holds every rank's state, and for each rank who does: itself, if it can.

    `told` has for each rank what it holds: the step and the rank of each copy.
    """
    ranks = len(told)
    for step in sorted({step for held in told for step, _ in held}, reverse=True):
        holders = [
            next((holder for holder in (rank, *range(ranks)) if (step, rank) in told[holder]), None)
            for rank in range(ranks)
        ]
        known = [holder for holder in holders if holder is not None]
        if len(known) == ranks:
            return step, known
    return None


def _aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


def _tensor_views(memory: Tensor, kinds: Sequence[tuple[torch.Size, torch.dtype]]) -> Iterator[Tensor]:
    """Tensors of these shapes and types in a stretch of memory, one after the other."""
    at = 0
    for shape, dtype in kinds:
        size = shape.numel() * dtype.itemsize
        yield memory[at : at + size].view(dtype).view(shape)
        at += _aligned(size)


def _send_and_receive(sent: Tensor, to: int, received: Tensor, source: int, group: dist.ProcessGroup | None) -> None:
    """Send to one rank while another sends."""
    works = [dist.isend(sent, to, group=group), dist.irecv(received, source, group=group)]
    for work in works:
        if work is not None:
            work.wait()

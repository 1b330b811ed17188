"""Model of how NCCL and CUDA execute the messages of a pipeline. The real PipelineP2P runs for each rank, its calls are
recorded, and the model decides whether they finish.

NCCL runs messages between two ranks in one group one after the other, in the order of the calls. It matches a send
with a receive, and each starts when the work that was queued before it is done. CUDA loads a kernel at its first
launch, for which the host waits until its GPU has finished all started work (CUDA C++ Programming Guide, "Lazy
Loading"). Started work includes a receive whose message is not sent yet."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from phalanx.parallel.comm.wait_timer import WaitTimer
from phalanx.parallel.pipeline import p2p
from phalanx.schedule.schedule import Schedule, actions

Communicator = tuple[str, int, int]


@dataclass(eq=False)
class Message:
    """Send or receive of a rank."""

    rank: int
    peer: int
    is_send: bool
    group: str
    queued_after: int = 0
    """Number of items in the rank's compute stream before this message."""
    is_done: bool = False

    @property
    def communicator(self) -> Communicator:
        return self.group, min(self.rank, self.peer), max(self.rank, self.peer)


@dataclass
class Rank:
    """Calls of a rank's host, in order: messages, waits for them, and kernels (None)."""

    number: int
    calls: list[Message | tuple[Message] | None] = field(default_factory=list)
    position: int = 0
    stream: list[Message | None] = field(default_factory=list)
    """Items of the GPU's stream: kernels, and messages to wait for."""
    computed: int = 0
    queues: dict[Communicator, list[Message]] = field(default_factory=lambda: defaultdict(list))

    def advance_host(self, loads_kernels: bool) -> bool:
        """Make the next call if the host may; return whether it did."""
        if self.position == len(self.calls):
            return False
        call = self.calls[self.position]
        if isinstance(call, Message):
            call.queued_after = len(self.stream)
            self.queues[call.communicator].append(call)
        elif call is None and loads_kernels and (self.queues_are_busy() or self.computed < len(self.stream)):
            return False
        else:
            self.stream.append(None if call is None else call[0])
        self.position += 1
        return True

    def advance_gpu(self) -> bool:
        """Compute all items that wait for nothing; return whether there was any."""
        start = self.computed
        while self.computed < len(self.stream):
            awaited = self.stream[self.computed]
            if awaited is not None and not awaited.is_done:
                break
            self.computed += 1
        return self.computed > start

    def queues_are_busy(self) -> bool:
        return any(self.queues.values())

    def first_message(self, communicator: Communicator) -> Message | None:
        """Return the running message if it can start."""
        queue = self.queues[communicator]
        return queue[0] if queue and queue[0].queued_after <= self.computed else None


def deadlock(ranks: list[Rank], loads_kernels: bool) -> str | None:
    """Run all ranks until nothing moves; return the blocked ranks and their calls, or None if all finished."""
    is_moving = True
    while is_moving:
        is_moving = False
        for rank in ranks:
            is_moving |= rank.advance_host(loads_kernels)
            is_moving |= rank.advance_gpu()
        for rank in ranks:
            for communicator in list(rank.queues):
                message = rank.first_message(communicator)
                other = message and ranks[message.peer].first_message(communicator)
                if message and other and message.is_send != other.is_send:
                    for done in (message, other):
                        done.is_done = is_moving = True
                        ranks[done.rank].queues[communicator].pop(0)
    stuck = [rank for rank in ranks if rank.position < len(rank.calls) or rank.computed < len(rank.stream)]
    if not stuck:
        return None
    return "; ".join(f"rank {rank.number} after call {rank.position} of {len(rank.calls)}" for rank in stuck)


def record_calls(
    monkeypatch: pytest.MonkeyPatch,
    schedule: Schedule,
    groups: tuple[str, str] = ("forward", "backward"),
    make_p2p: Callable[..., Any] = p2p.PipelineP2P,
) -> list[Rank]:
    """Run the real PipelineP2P of each rank through a schedule; return each rank's calls."""
    ranks = [Rank(number) for number in range(schedule.ranks)]
    for rank in ranks:
        monkeypatch.setattr(p2p, "dist", _RecordingDist(rank))
        shapes = [torch.Size([1])] * schedule.micro_batches
        links = make_p2p(schedule, rank.number, groups, shapes, torch.empty(0), WaitTimer())
        for step in schedule.orders[rank.number]:
            for action in actions(step):
                if (needed := schedule.input_message(action)) is not None:
                    links.receive(needed)
            for action in actions(step):
                rank.calls.append(None)
                if (output := schedule.output_message(action)) is not None:
                    links.send(output, torch.empty(1))
        links.finish()
    return ranks


def record_connections(monkeypatch: pytest.MonkeyPatch, schedule: Schedule) -> list[Rank]:
    """Connect each rank to its peers; return each rank's calls. NCCL creates a communicator at the first
    message of two ranks, and both hosts wait for it."""
    ranks = [Rank(number) for number in range(schedule.ranks)]
    for rank in ranks:
        monkeypatch.setattr(p2p, "dist", _RecordingDist(rank))
        p2p.connect_peers(schedule, rank.number, ("forward", "backward"), torch.empty(1))  # type: ignore[arg-type]
    return ranks


def communicators(ranks: list[Rank]) -> list[set[Communicator]]:
    """Return the communicators that each rank uses."""
    return [{call.communicator for call in rank.calls if isinstance(call, Message)} for rank in ranks]


@dataclass
class _RecordingDist:
    """Replacement of torch.distributed for one rank, which records calls."""

    rank: Rank

    def isend(self, tensor: torch.Tensor, group: str, group_dst: int, tag: int) -> _Work:
        return self._note(Message(self.rank.number, group_dst, True, group))

    def irecv(self, tensor: torch.Tensor, group: str, group_src: int, tag: int) -> _Work:
        return self._note(Message(self.rank.number, group_src, False, group))

    def send(self, tensor: torch.Tensor, group: str, group_dst: int) -> None:
        self._wait_on_host(Message(self.rank.number, group_dst, True, group))

    def recv(self, tensor: torch.Tensor, group: str, group_src: int) -> None:
        self._wait_on_host(Message(self.rank.number, group_src, False, group))

    def _wait_on_host(self, message: Message) -> None:
        """Record a call after which the host waits until its GPU is idle."""
        self._note(message).wait()
        self.rank.calls.append(None)

    def _note(self, message: Message) -> _Work:
        self.rank.calls.append(message)
        return _Work(self.rank, message)


@dataclass
class _Work:
    rank: Rank
    message: Message

    def wait(self) -> None:
        self.rank.calls.append((self.message,))

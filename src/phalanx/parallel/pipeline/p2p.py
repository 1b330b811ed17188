"""Point-to-point messages of pipeline ranks in a step: activations and their gradients."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.parallel.comm.wait_timer import WaitTimer
from phalanx.program.messages import MAX_POSTED_RECEIVES, count_delivered_before
from phalanx.schedule.schedule import Action, Schedule


@dataclass(frozen=True)
class Transfer:
    """A message on its way, and its buffer."""

    message: Action
    tensor: Tensor
    work: dist.Work | None

    def wait(self) -> None:
        """Wait until the message is complete."""
        if self.work is not None:
            self.work.wait()


class PipelineP2P:
    """The messages of a step between this rank and the other ranks of its pipeline.

    The schedule fixes the order of the messages on every link for both ends. Thus ranks send tensors only, without
    headers, and post a few receives ahead of their use."""

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        groups: tuple[dist.ProcessGroup, dist.ProcessGroup],
        shapes: Sequence[torch.Size],
        like: Tensor,
        pipeline_wait: WaitTimer,
    ) -> None:
        """Create the message queues of this rank of the pipeline, and post the first receives.

        The two `groups` carry messages to later ranks and to earlier ranks. `shapes` are the shapes of each
        micro-batch's activation, and `like` is a tensor of their dtype and device."""
        self.schedule = schedule
        self.rank = rank
        self.groups = groups
        self.pipeline_wait = pipeline_wait
        self.shapes = shapes
        self.like = like
        self._inbox: dict[Action, Tensor] = {}
        self._sends: dict[int, deque[Transfer]] = defaultdict(deque)
        self._num_released: Counter[int] = Counter()
        self._num_delivered = count_delivered_before(schedule, rank)
        self._expected_messages: dict[int, deque[Action]] = {
            sender: deque(message for message, receiver in schedule.messages(sender) if receiver == rank)
            for sender in range(schedule.ranks)
            if sender != rank
        }
        self._posted_receives: dict[int, deque[Transfer]] = defaultdict(deque)
        for sender in self._expected_messages:
            self._post_receives(sender)

    def send(self, message: Action, tensor: Tensor) -> None:
        """Send the output of a stage to the stage that needs it, without blocking."""
        receiver = self.schedule.receiver(message)
        if receiver == self.rank:
            self._inbox[message] = tensor
            return
        sent = tensor.contiguous()
        work = dist.isend(
            sent, group=self.groups[receiver < self.rank], group_dst=receiver, tag=self._message_tag(message)
        )
        self._sends[receiver].append(Transfer(message, sent, work))

    def receive(self, message: Action) -> Tensor:
        """Wait for the output of a stage, and return it."""
        while message not in self._inbox:
            sender = self.schedule.rank_of[message.stage]
            transfer = self._posted_receives[sender].popleft()
            self._post_receives(sender)
            with self.pipeline_wait.measure():
                transfer.wait()
            self._inbox[transfer.message] = transfer.tensor
            self._release_sends(sender, self._num_delivered[transfer.message])
        return self._inbox.pop(message)

    def finish(self) -> None:
        """Wait for all pending sends."""
        for receiver, sends in self._sends.items():
            self._release_sends(receiver, self._num_released[receiver] + len(sends))

    def _release_sends(self, receiver: int, count: int) -> None:
        """Release the buffers of the first `count` messages to a rank."""
        while self._num_released[receiver] < count:
            self._num_released[receiver] += 1
            self._sends[receiver].popleft().wait()

    def _post_receives(self, sender: int) -> None:
        expected = self._expected_messages[sender]
        posted = self._posted_receives[sender]
        while expected and len(posted) < MAX_POSTED_RECEIVES:
            message = expected.popleft()
            tensor = self.like.new_empty(self.shapes[message.micro])
            work = dist.irecv(
                tensor, group=self.groups[sender > self.rank], group_src=sender, tag=self._message_tag(message)
            )
            posted.append(Transfer(message, tensor, work))

    def _message_tag(self, message: Action) -> int:
        stage, kind, micro = message
        return (2 * stage + (kind == "B")) * len(self.shapes) + micro


def connect_peers(
    schedule: Schedule, rank: int, groups: tuple[dist.ProcessGroup, dist.ProcessGroup], token: Tensor
) -> None:
    """Exchange a tensor once over each link of each group, in one order on all ranks.

    NCCL creates the communicator of a pair of ranks at its first message, and the host blocks until the other rank
    joins. Two ranks that both post receives before any send would deadlock. `token` has one number, which is
    overwritten."""
    to_higher_rank, to_lower_rank = groups
    links = [*schedule.links, schedule.end_ranks]
    pairs = sorted({(min(link), max(link)) for link in links if min(link) < max(link) and rank in link})
    for low, high in pairs:
        _exchange_token(token, to_higher_rank, rank, sender=low, receiver=high)
    for low, high in pairs:
        _exchange_token(token, to_lower_rank, rank, sender=high, receiver=low)


def _exchange_token(token: Tensor, group: dist.ProcessGroup, rank: int, sender: int, receiver: int) -> None:
    if rank == sender:
        dist.send(token, group=group, group_dst=receiver)
    else:
        dist.recv(token, group=group, group_src=sender)

"""A pipeline schedule as data: the computations of each rank, in order.

A schedule is simulated, drawn, exchanged with PyTorch, and run. Letters are PyTorch's: F forward; B the full backward;
I and W its halves, the gradients of the stage's input and of its weights. (Papers on zero bubble write B for I.) `2F0`
is the forward pass of micro-batch 0 through stage 2."""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, cast

from phalanx.spec.errors import UserError

ActionKind = Literal["F", "B", "I", "W"]
COMMUNICATION = re.compile(r"\d+(SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD)\d*$")
ACTION = re.compile(r"(\d+)([FBIW])(\d+)$")
OVERLAPPED = re.compile(r"\(([^;]+);([^;]+)\)OVERLAP_F_B$")


class Action(NamedTuple):
    """One computation of one stage for one micro-batch."""

    stage: int
    kind: ActionKind
    micro: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro}"


class OverlappedPair(NamedTuple):
    """A forward and a backward pass of two micro-batches that overlap.

    Each computes while the other communicates (DualPipe, arXiv 2412.19437, section 3.2.1)."""

    forward: Action
    backward: Action

    def __str__(self) -> str:
        return f"({self.forward};{self.backward})OVERLAP_F_B"


ScheduleStep = Action | OverlappedPair
Grid = Sequence[Sequence[ScheduleStep | None]]
"""Rows of ranks, columns of ticks; None is an idle tick."""


def actions(step: ScheduleStep) -> tuple[Action, ...]:
    """Return the one or two computations of a step."""
    return (step,) if isinstance(step, Action) else tuple(step)


@dataclass(frozen=True)
class Schedule:
    """The computations of each pipeline rank, in order.

    Communication follows from them: the output of a stage is sent to the rank of the next stage as soon as it is ready.
    """

    orders: tuple[tuple[ScheduleStep, ...], ...]
    """Steps by rank."""

    @classmethod
    def from_rows(cls, orders: Iterable[Iterable[ScheduleStep | None]]) -> Schedule:
        """Return a schedule of these rows without their idle ticks."""
        return cls(tuple(tuple(step for step in order if step is not None) for order in orders))

    def actions(self, rank: int) -> Iterator[Action]:
        """Iterate over the computations of a rank, in order."""
        return iter(self._actions[rank])

    @cached_property
    def _actions(self) -> tuple[tuple[Action, ...], ...]:
        return tuple(tuple(action for step in order for action in actions(step)) for order in self.orders)

    @cached_property
    def rank_of(self) -> dict[int, int]:
        """The rank of every stage (the first rank that has it)."""
        rank_of_stage: dict[int, int] = {}
        for rank in range(len(self.orders)):
            for action in self.actions(rank):
                rank_of_stage.setdefault(action.stage, rank)
        return dict(sorted(rank_of_stage.items()))

    @property
    def end_ranks(self) -> tuple[int, int]:
        """The ranks of the first and of the last stage."""
        return self.rank_of[0], self.rank_of[self.stages - 1]

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self.orders)

    @cached_property
    def stages(self) -> int:
        """The number of stages."""
        return 1 + max(self.rank_of)

    @cached_property
    def micro_batches(self) -> int:
        """The number of micro-batches."""
        return 1 + max(action.micro for rank in range(self.ranks) for action in self.actions(rank))

    def stages_of(self, rank: int) -> list[int]:
        """Return the stages of a rank."""
        return [stage for stage, owner in self.rank_of.items() if owner == rank]

    def dependencies(self, action: Action) -> list[tuple[Action, ...]]:
        """Return the alternatives for each dependency of `action`: one action of each tuple must precede it."""
        return dependencies(action, self.stages)

    @cached_property
    def splits_backward(self) -> bool:
        """True if any backward pass is split into two halves."""
        return any(action.kind == "W" for rank in range(self.ranks) for action in self.actions(rank))

    def receiver(self, message: Action) -> int:
        """Return the rank that needs the output of an F, B or I (the last written as B)."""
        return self.rank_of[message.stage + (1 if message.kind == "F" else -1)]

    def messages(self, rank: int) -> Iterator[tuple[Action, int]]:
        """Yield the messages of a rank, in order, and their receivers.

        Messages are the outputs of forward passes except the last stage's, and the input gradients of backward passes
        except the first stage's. Those of input halves are written as B, too."""
        for action in self.actions(rank):
            message = self.output_message(action)
            if message is not None:
                yield message, self.receiver(message)

    @cached_property
    def links(self) -> Mapping[tuple[int, int], int]:
        """Number of messages by pair of sender and receiver."""
        ranks = range(self.ranks)
        return Counter((rank, receiver) for rank in ranks for _, receiver in self.messages(rank) if rank != receiver)

    def messages_by_receiver(self, rank: int) -> dict[int, int]:
        """Return the number of messages of a rank to each other rank that receives any."""
        return {receiver: count for (sender, receiver), count in self.links.items() if sender == rank}

    def output_message(self, action: Action) -> Action | None:
        """Return the message of an action to another stage; None if there is none."""
        stage, kind, micro = action
        if (kind == "F" and stage + 1 < self.stages) or (kind in "BI" and stage):
            return Action(stage, "F" if kind == "F" else "B", micro)
        return None

    def input_message(self, action: Action) -> Action | None:
        """Return the message that an action needs from another stage; None if there is none."""
        stage, kind, micro = action
        if kind == "F" and stage > 0:
            return Action(stage - 1, "F", micro)
        if kind in "BI" and stage + 1 < self.stages:
            return Action(stage + 1, "B", micro)
        return None


def dependencies(action: Action, stages: int) -> list[tuple[Action, ...]]:
    """Return the alternatives for each dependency of `action`: one action of each tuple must precede it.

    `stages` is the number of stages of the pipeline."""
    stage, kind, micro = action
    if kind == "F":
        return [(Action(stage - 1, "F", micro),)] if stage else []
    if kind == "W":
        return [(Action(stage, "I", micro),)]
    from_next_stage = [(Action(stage + 1, "B", micro), Action(stage + 1, "I", micro))] if stage + 1 < stages else []
    return [(Action(stage, "F", micro),), *from_next_stage]


def to_csv(schedule: Schedule) -> str:
    """Return the schedule as CSV for `torch.distributed.pipelining` ("compute_only"), a row per rank."""
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows(schedule.orders)
    return buffer.getvalue()


def read_csv(text: str, name: str = "schedule") -> list[list[ScheduleStep | None]]:
    """Return the rows of a schedule that PyTorch or `to_csv` wrote; empty cells are idle ticks.

    Communication is left out, because it follows from the computations. Raises UserError if a cell is not an action.
    """
    rows: list[list[ScheduleStep | None]] = []
    for cells in csv.reader(io.StringIO(text)):
        stripped = [cell.strip() for cell in cells]
        rows.append(
            [_parse_step(cell, f"{name}, rank {len(rows)}") for cell in stripped if not COMMUNICATION.match(cell)]
        )
    if not any(step for row in rows for step in row):
        raise UserError(name, None, "contains no actions", fix="write a row of actions per rank: 0F0,0F1,0B0,0B1")
    return rows


def _parse_step(cell: str, location: str) -> ScheduleStep | None:
    if not cell:
        return None
    if overlapped := OVERLAPPED.match(cell):
        forward, backward = (_parse_step(action_text.strip(), location) for action_text in overlapped.groups())
        if isinstance(forward, Action) and isinstance(backward, Action):
            return OverlappedPair(forward, backward)
    if fields := ACTION.match(cell):
        stage, kind, micro = fields.groups()
        return Action(int(stage), cast(ActionKind, kind), int(micro))
    fix = "write the stage, one of F, B, I, W, and the micro-batch, such as 2F0; leave idle cells empty"
    raise UserError(location, cell, "is not an action", fix)

"""Task of a node as a function of the swarm's state: the round, its text, and the experts to train."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.swarm.coordinator.swarm_state import SwarmState


@dataclass(frozen=True, kw_only=True)
class NodeTask:
    """The next task of a node."""

    round: int
    """The open round if the node is in it, else the next round."""
    committed: int
    """Number of rounds with a result."""
    done: bool
    member: bool
    """True if the node is a member of the swarm, False after too long without a heartbeat."""
    first_step: int | None = None
    """First step of the text that the node reads, or None if it is not in the open round."""
    steps: int = 0
    """Number of steps of text."""
    owned: tuple[int, ...] = ()
    already_sent: bool = False
    closes_in_seconds: float | None = None
    problem: str = ""
    """The present problem of the coordinator, for which its operator must look."""

    def reached(self, round: int | None, committed: int | None) -> bool:
        """Return whether the node is in `round` or later, `committed` rounds are done, or all rounds are."""
        ready = round is not None and self.first_step is not None and self.round >= round
        return self.done or ready or (committed is not None and self.committed >= committed)


def node_task(state: SwarmState, node: str, now: float, closing: bool = False) -> NodeTask:
    """Return the task of a node: that of the open round if the node can still take part in it, else of the next round.

    `now` is the time of the coordinator's clock. `closing`: the open round accepts no more updates.
    """
    is_member = node in state.members
    open_round = state.round
    if open_round is None or closing or node not in open_round.data_assignments:
        next_round = state.committed + (open_round is not None)
        return NodeTask(round=next_round, committed=state.committed, done=state.done, member=is_member)
    first_step, steps = open_round.data_assignments[node]
    close_time = state.closes_at()
    return NodeTask(
        round=open_round.number,
        committed=state.committed,
        done=False,
        member=is_member,
        first_step=first_step,
        steps=steps,
        owned=state.owned(node),
        already_sent=node in open_round.updates,
        closes_in_seconds=None if close_time is None else close_time - now,
    )

"""Plan of a node's round: its steps around the exchange, and which of its own it keeps when it receives the result.

Without `swarm.delay`, a node continues from the shared weights. With a delay it trains during the exchange, and the
result lacks these local steps:

    steps of round n -> update -> merged with other nodes -> shared weights --+
                          |                                                   +-> weights of round n+1
                          +-> steps of round n+1 during the exchange ---------+
"""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.spec.run import RunSpec
from phalanx.swarm.coordinator.node_task import NodeTask
from phalanx.swarm.worker.exchange import RoundExchange


@dataclass(frozen=True, kw_only=True)
class RoundSteps:
    """Optimizer steps of a node in a round."""

    before_update: int
    """Steps until the update, without those of this round that the node did during the previous exchange."""
    during_exchange: int
    """Steps of the next round while the update is sent and the result received."""


@dataclass(frozen=True, kw_only=True)
class RoundPlan:
    """Receipt of the results of rounds, and which of its own weights a node keeps."""

    committed: int
    """Number of rounds that the shared weights then include; more if results were removed."""
    accepted_round: int | None
    """The last round with an accepted update of this node."""
    final: bool
    """No round follows, so the rank takes the shared weights and keeps none of its own."""
    keeps_local_steps: bool
    """The node has trained since the update that the result contains, and keeps these steps."""
    keeps_local_experts: bool
    """The node keeps its own experts, because the result contains them as the node sent them.

    These still include the errors of their encoding, which are therefore not sent again.
    """


def plan_steps(run: RunSpec, task: NodeTask, steps_ahead: int) -> RoundSteps:
    """Return the steps of a round. `steps_ahead` steps of the round are already done."""
    assert run.swarm is not None
    before_update = run.swarm.steps_per_round - steps_ahead
    is_last_round = (task.round + 1) * run.swarm.steps_per_round >= run.training.steps
    # In the first round of a node, the coordinator assigns it more text.
    remaining_text = task.steps - before_update
    during_exchange = 0 if is_last_round else min(run.swarm.delay, remaining_text)
    return RoundSteps(before_update=before_update, during_exchange=during_exchange)


def plan_round(
    exchange: RoundExchange, committed: int, accepted_round: int | None = None, final: bool = False
) -> RoundPlan:
    """Plan the receipt of all results up to a number of committed rounds.

    `accepted_round` is the last one that accepted this node's update; None after an absence. `final`: no round follows.
    """
    receives_only_accepted_round = accepted_round == exchange.version == committed - 1
    keeps_local_steps = exchange.swarm.delay > 0 and receives_only_accepted_round
    return RoundPlan(
        committed=committed,
        accepted_round=accepted_round,
        final=final,
        keeps_local_steps=keeps_local_steps,
        keeps_local_experts=keeps_local_steps and exchange.local_experts_are_final(committed - 1),
    )

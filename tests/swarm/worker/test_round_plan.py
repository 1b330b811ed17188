"""Plans of a node's round: its steps, and what it keeps of its own when it receives results."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.swarm.coordinator.node_task import NodeTask
from phalanx.swarm.worker.exchange import RoundExchange
from phalanx.swarm.worker.round_plan import plan_round, plan_steps
from tests.helpers.local_swarm import tiny_swarm_run


def make_exchange(folder: Path, version: int, **swarm: object) -> RoundExchange:
    """Return a node's files after `version` rounds."""
    exchange = RoundExchange(tiny_swarm_run(folder, **swarm), folder, "ann", link=None)
    exchange.version = version
    exchange.local_experts = (0, 1)
    return exchange


@pytest.mark.parametrize(
    ("round_number", "text", "steps_ahead", "before_update", "during_exchange"),
    [
        pytest.param(0, 5, 0, 3, 2, id="the first round has text for the delay"),
        pytest.param(1, 3, 2, 1, 2, id="steps that are already done are not repeated"),
        pytest.param(1, 3, 0, 3, 0, id="after an absence no text remains"),
        pytest.param(3, 3, 2, 1, 0, id="no round follows the last one"),
    ],
)
def test_plan_steps_trains_during_exchange_while_text_remains(
    tmp_path: Path, round_number: int, text: int, steps_ahead: int, before_update: int, during_exchange: int
) -> None:
    task = NodeTask(round=round_number, committed=round_number, done=False, member=True, first_step=0, steps=text)
    steps = plan_steps(tiny_swarm_run(tmp_path, delay=2), task, steps_ahead)
    assert (steps.before_update, steps.during_exchange) == (before_update, during_exchange)


@pytest.mark.parametrize(
    ("delay", "accepted_round", "committed", "is_kept"),
    [
        pytest.param(2, 1, 2, True, id="the result of the accepted update"),
        pytest.param(0, 1, 2, False, id="no steps during the exchange"),
        pytest.param(2, None, 2, False, id="refused"),
        pytest.param(2, 1, 3, False, id="another round was missed"),
        pytest.param(2, 0, 2, False, id="an earlier update"),
    ],
)
def test_plan_round_keeps_local_steps_only_for_result_of_accepted_update(
    tmp_path: Path, delay: int, accepted_round: int | None, committed: int, is_kept: bool
) -> None:
    exchange = make_exchange(tmp_path, version=1, delay=delay)
    plan = plan_round(exchange, committed, accepted_round)
    assert plan.keeps_local_steps == is_kept
    assert plan.keeps_local_experts == is_kept  # spes+ without merging: no other node trains them
    assert not plan.final


def test_plan_round_replaces_local_experts_that_other_nodes_train(tmp_path: Path) -> None:
    plan = plan_round(make_exchange(tmp_path, version=1, delay=2, replication=2), 2, accepted_round=1)
    assert plan.keeps_local_steps
    assert not plan.keeps_local_experts


def test_plan_round_of_last_result_keeps_nothing(tmp_path: Path) -> None:
    plan = plan_round(make_exchange(tmp_path, version=3, delay=2), 4, final=True)
    assert (plan.final, plan.keeps_local_steps, plan.keeps_local_experts) == (True, False, False)

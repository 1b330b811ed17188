"""The decayed balance loss over the rounds of a swarm."""

from __future__ import annotations

from typing import Any

import pytest

from phalanx.swarm.worker.worker import SwarmWorker
from tests.helpers.local_swarm import NODES, WorkerThreads, serve_local_swarm, tiny_swarm_run


class StepsWithChoiceWeights(list[dict[str, Any]]):
    """Records of a node's steps, each with the choice weights (`relief`) of its routers."""

    def __init__(self, node: SwarmWorker) -> None:
        super().__init__()
        self.node = node

    def append(self, record: dict[str, Any]) -> None:
        assert self.node.trainer is not None
        reliefs = [router.relief for router in self.node.trainer.routers.values()]
        super().append({**record, "relief": [None if relief is None else relief.tolist() for relief in reliefs]})


class ChoiceWeightRecordingWorkerThreads(WorkerThreads):
    def add(self, name: str) -> None:
        super().add(name)
        self.steps[name] = StepsWithChoiceWeights(self.nodes[name])


@pytest.mark.parametrize("swarm_options", [{}, {"delay": 1}, {"fragments": 3}], ids=str)
def test_swarm_balance_loss_ratio_follows_step_number_across_rounds(tmp_path, swarm_options):
    """The ratio is 0.4 at first and rises linearly to 1 over half of the 12 steps."""
    run = tiny_swarm_run(tmp_path, balance={"local_expert_weight": 0.4, "fraction": 0.5}, **swarm_options)
    with serve_local_swarm(run, tmp_path) as swarm:
        members = ChoiceWeightRecordingWorkerThreads(swarm, tmp_path, NODES[:2])
        members.wait_all()
    for name, node in members.nodes.items():
        steps = members.steps[name]
        assert [record["step"] for record in steps] == list(range(1, 13))
        for record in steps:
            ratio = min(1.0, 0.4 + 0.6 * (record["step"] - 1) / 6)
            counts = [pytest.approx(ratio) if expert in node.exchange.local_experts else 1.0 for expert in range(4)]
            assert record["relief"] == [counts if ratio < 1 else None] * 2

"""Counts of a node's steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.runs.swarm_records import RoundRecord
from phalanx.swarm.worker.worker import SwarmWorker


class CountingTrainer(SimpleNamespace):
    """A trainer whose steps have 64 tokens, of which 10 are targets."""

    def train_step(self, batches: object) -> dict[str, Any]:
        self.tokens += 64
        self.targets += 10
        self.step += 1
        return {"grad_norm": float("nan") if self.step == 2 else 1.0}


@pytest.mark.parametrize(("sends_gradients", "targets"), [(False, 30), (True, 20)])
def test_node_weight_in_means_is_its_number_of_targets(sends_gradients: bool, targets: int) -> None:
    """With ddp, the targets of a step whose gradient is not sent do not count."""
    trainer = CountingTrainer(tokens=640, targets=99, step=0, should_stop=False)
    swarm = SimpleNamespace(balance=SimpleNamespace(local_expert_weight=1), sends_gradients=sends_gradients)
    worker: Any = SimpleNamespace(trainer=trainer, batches=iter(()), swarm=swarm)
    round_record = RoundRecord(round=0)
    assert SwarmWorker._train_steps(worker, 3, round_record, []) == 3
    assert round_record.tokens == targets

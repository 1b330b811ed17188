"""While a node learns on, its word goes out and what came of the round comes in; neither keeps a node from stopping."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from phalanx.runs.swarm_records import RoundRecord
from phalanx.swarm.worker.exchange import RoundExchange
from phalanx.swarm.worker.worker import SwarmWorker
from tests.helpers.local_swarm import NODES, WorkerThreads, serve_local_swarm, tiny_swarm_run, train_local_swarm


@pytest.mark.parametrize("delay", [0, 2])
def test_swarm_worker_overlaps_round_downloads_with_training_when_delay_set(
    tmp_path: Path, monkeypatch: Any, delay: int
) -> None:
    """Once, by the sender; except for the last round, after which nothing is learned."""
    received: list[tuple[str, int, str]] = []
    get = RoundExchange._download_round

    def noted(exchange: RoundExchange, number: int, told: bool, spent: RoundRecord) -> None:
        received.append((exchange.name, number, threading.current_thread().name.partition("_")[0]))
        get(exchange, number, told, spent)

    monkeypatch.setattr(RoundExchange, "_download_round", noted)
    train_local_swarm(tiny_swarm_run(tmp_path, delay=delay), tmp_path, NODES[:2])
    assert sorted(place[:2] for place in received) == [(node, number) for node in NODES[:2] for number in range(4)]
    beside = {number for _, number, thread in received if thread == "swarm exchange"}
    assert beside == (set(range(3)) if delay else set())


def test_swarm_worker_raises_training_error_without_waiting_for_open_round(tmp_path: Path, monkeypatch: Any) -> None:
    """The round of its update stays open for a minute."""
    learn = SwarmWorker._train_steps

    def fails(node: SwarmWorker, steps: int, spent: RoundRecord, logs: Any, in_time: bool = False) -> int:
        if not in_time:
            raise MemoryError("no room")
        return learn(node, steps, spent, logs, in_time)

    monkeypatch.setattr(SwarmWorker, "_train_steps", fails)
    with serve_local_swarm(tiny_swarm_run(tmp_path, delay=2), tmp_path) as swarm:
        swarm.joined_client(NODES[1])  # and never tells
        members = WorkerThreads(swarm, tmp_path, NODES[:1])
        members.threads[0].join(30)
        assert not members.threads[0].is_alive()
        assert [type(error) for error in members.failed] == [MemoryError]
        assert not swarm.events("committed")

"""Exchanges of rounds that overlap with training, and errors of a node while a round is open."""

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
    """Each node downloads each round once; with a delay, the exchange thread does it, except for the last round, after
    which no training follows."""
    downloads: list[tuple[str, int, str]] = []
    download_round = RoundExchange._download_round

    def record_download(exchange: RoundExchange, number: int, was_accepted: bool, round_record: RoundRecord) -> None:
        downloads.append((exchange.name, number, threading.current_thread().name.partition("_")[0]))
        download_round(exchange, number, was_accepted, round_record)

    monkeypatch.setattr(RoundExchange, "_download_round", record_download)
    train_local_swarm(tiny_swarm_run(tmp_path, delay=delay), tmp_path, NODES[:2])
    assert sorted(download[:2] for download in downloads) == [
        (node, number) for node in NODES[:2] for number in range(4)
    ]
    overlapped = {number for _, number, thread in downloads if thread == "swarm exchange"}
    assert overlapped == (set(range(3)) if delay else set())


def test_swarm_worker_raises_training_error_without_waiting_for_open_round(tmp_path: Path, monkeypatch: Any) -> None:
    """The round would stay open for a minute, because the other node sends no update."""
    train_steps = SwarmWorker._train_steps

    def fail_before_deadline(
        node: SwarmWorker, steps: int, round_record: RoundRecord, loggers: Any, in_time: bool = False
    ) -> int:
        if not in_time:
            raise MemoryError("no room")
        return train_steps(node, steps, round_record, loggers, in_time)

    monkeypatch.setattr(SwarmWorker, "_train_steps", fail_before_deadline)
    with serve_local_swarm(tiny_swarm_run(tmp_path, delay=2), tmp_path) as swarm:
        swarm.joined_client(NODES[1])  # and never sends an update
        members = WorkerThreads(swarm, tmp_path, NODES[:1])
        members.threads[0].join(30)
        assert not members.threads[0].is_alive()
        assert [type(error) for error in members.failed] == [MemoryError]
        assert not swarm.events("committed")

"""Coordinator without a server, whose clock and nodes are controlled by the test."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

from phalanx.runs.jsonl import read_jsonl
from phalanx.spec.run import RunSpec
from phalanx.swarm.coordinator.coordinator import Coordinator
from phalanx.swarm.serve import initial_pieces
from tests.helpers.swarm_updates import write_node_update


class SimulatedCoordinator:
    """Coordinator without a server, and its clock; the test sends the updates of its nodes."""

    def __init__(self, run: RunSpec, folder: Path) -> None:
        self.run = run
        self.folder = folder
        self.now = 0.0
        (folder / "lead").mkdir()
        self.start()
        for node in ("ann", "bob"):
            self.coordinator.join(node, 4, "text")
        self.tick_until(0.0)

    def start(self) -> None:
        """Start the coordinator, or restart it after it was killed."""
        self.coordinator = Coordinator(self.run, self.folder / "lead", initial_pieces(self.run), clock=lambda: self.now)

    def tick_until(self, time: float) -> None:
        """Continue until a time, with heartbeats of the nodes."""
        while True:
            for node in ("ann", "bob"):
                self.coordinator.heartbeat(node)
            self.coordinator.tick()
            if self.now >= time:
                return
            self.now = min(time, self.now + 0.5)

    def send_update(self, node: str, change: float = 0.01, targets: int = 100) -> None:
        """Send an update of the open round that moves all weights equally."""
        number = self.coordinator.state.round.number
        swarm = SimpleNamespace(coordinator=self.coordinator, run=self.run)
        with self.coordinator.receiving_update(node, number, "x") as (path, _):
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(write_node_update(swarm, self.folder, node, change), path)
            self.coordinator.accept_update(node, number, "x", tokens=targets, steps=3)

    @property
    def committed_nodes(self) -> list[list[str]]:
        """Return the nodes of each committed round."""
        return [event["nodes"] for event in read_jsonl(self.coordinator.journal.path) if event["kind"] == "committed"]

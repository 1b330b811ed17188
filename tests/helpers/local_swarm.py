"""Swarm in one process: the coordinator's server and the nodes are threads, and the connections are real."""

from __future__ import annotations

import atexit
import json
import shutil
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx.data.prepare import prepare
from phalanx.spec.files.write import to_toml
from phalanx.spec.parameter_shapes import parameter_shapes
from phalanx.spec.run import RunSpec
from phalanx.swarm.coordinator.coordinator import Coordinator
from phalanx.swarm.pieces import model_pieces
from phalanx.swarm.rpc.certificates import create_certificate_authority, issue_certificate
from phalanx.swarm.rpc.client import SwarmClient
from phalanx.swarm.rpc.server import serve
from phalanx.swarm.serve import initial_pieces
from phalanx.swarm.tensor_files import TensorFile
from phalanx.swarm.worker.replica import write_weights
from phalanx.swarm.worker.worker import SwarmWorker
from phalanx.train.training_data import open_training_data
from tests.helpers.small_runs import MOE, make_trainer, small_run, train_until

TIMEOUT_SECONDS = 120
NODES = ("ann", "bob", "cid", "dee")


@cache
def certificates() -> Path:
    """Create an authority, and certificates of members."""
    folder = Path(tempfile.mkdtemp(prefix="phalanx-certs-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    create_certificate_authority(folder)
    issue_certificate(folder, "lead", ["127.0.0.1", "localhost"])
    for node in NODES:
        issue_certificate(folder, node, [])
    return folder


def tiny_swarm_run(folder: Path, changes: dict[str, Any] | None = None, **swarm: Any) -> RunSpec:
    """Return the run of a tiny mixture of experts, by default for two nodes and four rounds of three steps."""
    model = {**MOE, "tie_embeddings": False, "moe": {**MOE["moe"], "bias_update_rate": 0.0}}
    spec = {"method": "spes+", "nodes": 2, "every": 3, "round": {"grace_seconds": 60, "lease_seconds": 60}, **swarm}
    table = {
        "model": model,
        "training.steps": 12,
        "training.precision": "fp32",
        "swarm": spec,
        "output_dir": str(folder),
        "cluster.device": "cpu",
        **(changes or {}),
    }
    return small_run(Path(json.__file__).parent, folder, table)


class LocalSwarm:
    """Coordinator with its server and its clock."""

    def __init__(self, run: RunSpec, folder: Path, port: int = 0) -> None:
        folder.mkdir(exist_ok=True)
        self.run, self.folder = run, folder
        self.coordinator = Coordinator(run, folder, initial_pieces(run))
        greeting = {"run": to_toml(run)}
        self.server, self.port = serve(self.coordinator, f"127.0.0.1:{port}", certificates() / "lead", greeting)
        self.over = threading.Event()
        self.ticking = threading.Thread(target=self._tick, daemon=True)
        self.ticking.start()

    def _tick(self) -> None:
        while not self.over.wait(0.02):
            self.coordinator.tick()

    def stop(self) -> None:
        """Stop the server as a kill would, without a message to the nodes."""
        self.over.set()
        self.ticking.join(TIMEOUT_SECONDS)
        self.server.stop(0).wait(TIMEOUT_SECONDS)
        self.coordinator.journal.close()

    def client(self, node: str) -> SwarmClient:
        return SwarmClient(f"127.0.0.1:{self.port}", certificates() / node)

    def joined_client(self, node: str, capacity: float = 4, text: str = "text") -> SwarmClient:
        """Return the client of a node that has joined."""
        client = self.client(node)
        client.join_message = {"capacity": capacity, "text": text}
        client.join(**client.join_message)
        return client

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Return the events of a kind in the journal."""
        lines = self.coordinator.journal.path.read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["kind"] == kind]

    def base(self) -> dict[str, Tensor]:
        with self.coordinator.changed:  # wait until no round is being written
            return read_pieces(self.run, self.coordinator.store.base)


@contextmanager
def serve_local_swarm(run: RunSpec, folder: Path) -> Iterator[LocalSwarm]:
    swarm = LocalSwarm(run, folder / "lead")
    try:
        yield swarm
    finally:
        swarm.stop()


def read_pieces(run: RunSpec, path: Path) -> dict[str, Tensor]:
    """Return the pieces of a model file."""
    with TensorFile(path) as file:
        return {item.key: file.read(item) for item in model_pieces(run.model)}


class WorkerThreads:
    """Nodes of one rank, each training in its own thread."""

    def __init__(self, swarm: LocalSwarm, folder: Path, names: Sequence[str]) -> None:
        self.swarm, self.folder = swarm, folder
        self.nodes: dict[str, SwarmWorker] = {}
        self.evaluations: dict[str, dict[str, Any]] = {}
        self.rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
        self.steps: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
        self.failed: list[BaseException] = []
        self.threads = [threading.Thread(target=self._learn, args=(name,), daemon=True) for name in names]
        for name in names:
            self.add(name)
        for thread in self.threads:
            thread.start()

    def add(self, name: str) -> None:
        run, directory = self.swarm.run, self.folder / name
        directory.mkdir(exist_ok=True)
        corpus = open_training_data(run, prepare(run.data))
        self.nodes[name] = SwarmWorker(
            run, corpus, directory, torch.device("cpu"), name, self.swarm.joined_client(name)
        )

    def _learn(self, name: str) -> None:
        try:
            logs = [_ListLogger(self.steps[name])]
            self.evaluations[name] = self.nodes[name].participate(logs, _ListLogger(self.rounds[name]))
        except BaseException as error:
            self.failed.append(error)

    def wait_all(self) -> None:
        """Wait until the last round is finished."""
        for thread in self.threads:
            thread.join(TIMEOUT_SECONDS)
            assert not thread.is_alive(), _stack_of(thread)
        for error in self.failed:
            raise error


def _stack_of(thread: threading.Thread) -> str:
    """Return the current stack of a thread."""
    frame = sys._current_frames().get(thread.ident or 0)
    return "".join(traceback.format_stack(frame)) if frame is not None else "it has just ended"


class _ListLogger:
    """Handler that keeps log records in a list."""

    def __init__(self, records: list[dict[str, Any]]) -> None:
        self.kept = records

    def write(self, record: dict[str, Any]) -> None:
        self.kept.append(dict(record))

    def close(self, failed: bool = False) -> None:
        pass


def train_local_swarm(run: RunSpec, folder: Path, names: Sequence[str]) -> tuple[dict[str, Tensor], WorkerThreads]:
    """Train a run with a swarm of these nodes to its end."""
    with serve_local_swarm(run, folder) as swarm:
        members = WorkerThreads(swarm, folder, names)
        members.wait_all()
        return swarm.base(), members


Weights = dict[str, torch.Tensor]


def train_without_swarm(run: RunSpec, folder: Path) -> Weights:
    """Return the weights of the same run, trained by one process without a swarm."""
    plain = run.model_copy(update={"swarm": None})
    trainer = make_trainer(plain)
    train_until(trainer, run.training.steps)
    path = folder / "alone.safetensors"
    with TensorFile.create(path, parameter_shapes(run.model)) as file:
        write_weights(trainer.strategy, trainer.mesh, None, run.model.moe.num_experts, file)
    return read_pieces(run, path)

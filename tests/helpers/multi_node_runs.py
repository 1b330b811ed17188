"""Runs of several nodes, each of which is a host in its own network namespace."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from phalanx.data.prepare import prepare
from phalanx.spec.files.write import to_toml
from phalanx.testing.network_namespaces import NamespacesUnavailable, StarNetwork, star_network
from phalanx.testing.processes import WAIT_SECONDS, rank_pids, wait_until
from tests.helpers.small_runs import small_run

NODE_NAMES = ("first", "second")
PORT = 29_400
CHANGES = {
    "training.steps": 100_000,
    "training.collective_timeout_seconds": 6,
    "training.tokens_per_step": 64 * 32,
    "checkpoint.every": 5,
    "cluster.nproc_per_node": 2,
    "cluster.peak_flops": 5e10,
    "recovery": {"rendezvous_timeout_seconds": 60, "last_call_timeout_seconds": 3},
}
TRAINING_CHANGES = {name: value for name, value in CHANGES.items() if name.startswith("training.")}


class MultiNodeRun:
    """The launchers of a run's nodes."""

    def __init__(self, network: StarNetwork, run: Path, nodes: str) -> None:
        self.network, self.run, self.nodes = network, run, nodes
        self.processes: dict[str, subprocess.Popen[str]] = {}

    def start(self, name: str) -> None:
        """Start or restart a node."""
        command = [
            sys.executable,
            "-m",
            "phalanx",
            "train",
            str(self.run),
            "--nodes",
            self.nodes,
            "--rendezvous",
            f"first:{PORT}",
            "--resume",
        ]
        with (self.run.parent / f"{name}.log").open("a") as log:
            self.processes[name] = subprocess.Popen(
                [*self.network.hosts[name].prefix, *command], stdout=log, stderr=log, text=True, start_new_session=True
            )

    def kill(self, name: str) -> None:
        """Kill a whole node: its launcher and its ranks."""
        os.kill(self.processes[name].pid, signal.SIGKILL)  # ip netns exec has become the launcher
        self.processes[name].wait(timeout=WAIT_SECONDS)

    def log_text(self, name: str) -> str:
        return (self.run.parent / f"{name}.log").read_text()

    def wait_for_exit(self, name: str) -> int:
        try:
            return self.processes[name].wait(timeout=WAIT_SECONDS)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{name} does not end: {self.log_text(name)}") from None


@contextmanager
def multi_node_run(tmp_path: Path, changes: dict[str, Any], count: str = "1:2") -> Iterator[MultiNodeRun]:
    run = small_run(Path(json.__file__).parent, tmp_path, {**CHANGES, **changes})
    file = tmp_path / "run.toml"
    file.write_text(to_toml(run))
    prepare(run.data)
    try:
        with star_network(NODE_NAMES) as network:
            multi_node = MultiNodeRun(network, file, count)
            try:
                yield multi_node
            finally:
                for process in multi_node.processes.values():
                    with suppress(ProcessLookupError):
                        process.kill()
                    process.wait(timeout=WAIT_SECONDS)
                wait_until(lambda: not rank_pids(tmp_path / "parity"), "no rank is left")
    except NamespacesUnavailable as none:
        pytest.skip(f"this process may not make networks: {none}")

"""Processes of a swarm, each on a separate host, with access to the coordinator's journal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from phalanx.runs.jsonl import read_jsonl
from phalanx.runs.swarm_records import JOURNAL_FILE
from phalanx.swarm.rpc.certificates import create_certificate_authority, issue_certificate
from phalanx.testing.network_namespaces import Host, StarNetwork

COORDINATOR = "lead"
PORT = 7077


class SwarmProcesses:
    """`phalanx swarm serve` on the hub, and `phalanx swarm join` on the hosts.

    `folder` contains certs/NAME (certificates), nodes/NAME (run directories) and NAME.txt (output)."""

    def __init__(self, network: StarNetwork, folder: Path, run_file: Path, coordinator_directory: Path) -> None:
        """Issue the certificates."""
        self.network = network
        self.folder = folder
        self.run_file = run_file
        self.coordinator_folder = coordinator_directory
        self.process_by_name: dict[str, subprocess.Popen[bytes]] = {}
        create_certificate_authority(folder / "certs")
        issue_certificate(folder / "certs", COORDINATOR, [host.hub for host in network.hosts.values()])
        for name in network.hosts:
            issue_certificate(folder / "certs", name, [])

    def start(self, name: str) -> None:
        """Start or restart the coordinator or a node."""
        if name == COORDINATOR:
            host = self.network.hub
            args = ["serve", str(self.run_file), "--listen", f"0.0.0.0:{PORT}"]
        else:
            host = self.network.hosts[name]
            args = ["join", self.address(host), "--out", str(self.folder / "nodes"), "--nproc", "1"]
        args += ["--certs", str(self.folder / "certs" / name)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with (self.folder / f"{name}.txt").open("ab") as log:
            command = [*host.prefix, sys.executable, "-m", "phalanx", "swarm", *args]
            options: dict[str, Any] = {"env": environment, "start_new_session": True}
            self.process_by_name[name] = subprocess.Popen(command, stdout=log, stderr=log, **options)

    def start_all(self) -> None:
        """Start the coordinator, and every node."""
        for name in (COORDINATOR, *self.network.hosts):
            self.start(name)

    def address(self, host: Host) -> str:
        """Return the coordinator's address for a host."""
        return f"{host.hub}:{PORT}"

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal to all processes of the coordinator or a node."""
        os.killpg(self.process_by_name[name].pid, number)

    def kill(self, name: str) -> None:
        """Kill the coordinator or a node immediately."""
        with suppress(ProcessLookupError):
            self.signal(name, signal.SIGKILL)
        self.process_by_name[name].wait()

    def output(self, name: str) -> str:
        """Return the last output of the coordinator or a node."""
        return (self.folder / f"{name}.txt").read_text()[-2000:]

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        """Return the events of the coordinator's journal, optionally only of these kinds."""
        events = read_jsonl(self.coordinator_folder / JOURNAL_FILE)
        return [event for event in events if not kinds or event["kind"] in kinds]

    def committed_rounds(self) -> int:
        """Return the number of committed rounds."""
        return len(self.events("committed"))

    def wait_until(self, condition: Callable[[], bool], description: str, seconds: float) -> None:
        """Wait until a condition is true.

        Raises AssertionError if the time is over, or a process exits that was not killed.
        """
        deadline = time.monotonic() + seconds
        while not condition():
            for name, process in self.process_by_name.items():
                if process.poll() not in (None, 0, -signal.SIGKILL):
                    raise AssertionError(f"{name} exited with code {process.returncode}: {self.output(name)}")
            if time.monotonic() > deadline:
                last_events = f"{self.events()[-8:]}; {self.output(COORDINATOR)}"
                raise AssertionError(f"timed out after {seconds:g} s: {description}; {last_events}")
            time.sleep(0.02)

    def wait_all(self, seconds: float) -> None:
        """Wait until all processes have exited by themselves."""
        processes = self.process_by_name.values()
        self.wait_until(lambda: all(process.poll() == 0 for process in processes), "the end", seconds)


@contextmanager
def swarm_processes(
    network: StarNetwork, folder: Path, run_file: Path, coordinator_directory: Path
) -> Iterator[SwarmProcesses]:
    """Create the processes of a swarm, and kill them on exit."""
    processes = SwarmProcesses(network, folder, run_file, coordinator_directory)
    try:
        yield processes
    finally:
        for name in processes.process_by_name:
            processes.kill(name)

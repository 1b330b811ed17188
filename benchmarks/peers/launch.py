"""Parent process of trainers: start the ranks of one or several trainers, run their steps, stop them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.shapes import MORE_RANKS, RANKS
from phalanx.launch import process as launch

ROOT = Path(__file__).resolve().parents[2]
# All trainers have the environment variables of Phalanx's launcher.
ENVIRONMENT = {**launch.WORKER_ENVIRONMENT, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "DS_ACCELERATOR": "cpu"}


@dataclass(frozen=True)
class Block:
    """Measurements of some steps of a trainer on one rank."""

    seconds: list[float]
    """Wall time of each step."""
    cpu_seconds: list[float]
    """CPU time of all threads of the process in each step."""
    losses: list[float]
    peak_bytes: int
    """Peak resident memory of the process so far."""


class Ranks:
    """Processes with initialized trainers, which are idle during the steps of other trainers."""

    def __init__(self, python: Path, shape: str, layout: str, data: str, trainers: Sequence[str]) -> None:
        self._log = Path(tempfile.mkstemp(prefix="phalanx-peer-", suffix=".log")[1])
        self._processes: list[subprocess.Popen[str]] = []
        self._answers: list[Any] = []
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        ranks = MORE_RANKS.get(layout, RANKS)
        for rank in range(ranks):
            self._start(rank, ranks, port, [str(python), "-m", "benchmarks.peers.rank", shape, layout, data, *trainers])
        self._read()

    def _start(self, rank: int, ranks: int, port: int, command: list[str]) -> None:
        read, write = os.pipe()
        variables = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": ranks,
            "LOCAL_WORLD_SIZE": ranks,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "ANSWERS": write,
            **ENVIRONMENT,
        }
        with self._log.open("a") as log:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, **{name: str(value) for name, value in variables.items()}},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=[write],
                text=True,
            )
        os.close(write)
        self._processes.append(process)
        self._answers.append(os.fdopen(read))

    def run(self, trainer: str, steps: int) -> list[Block]:
        """Run `steps` steps of a trainer; return the measurements by rank."""
        return [Block(**value) for value in self._ask(f"{trainer} {steps}")]

    def _ask(self, line: str) -> list[Any]:
        for process in self._processes:
            assert process.stdin
            process.stdin.write(f"{line}\n")
            process.stdin.flush()
        return self._read()

    def sent_bytes(self, trainer: str) -> float:
        """Return the maximum of the bytes that a rank sends in one step."""
        return max(self._ask(f"{trainer} bytes"))

    def close(self) -> None:
        """Stop the ranks."""
        for process in self._processes:
            process.kill()
            process.wait()
        self._log.unlink(missing_ok=True)

    def _read(self) -> list[Any]:
        """Read the next answer of every rank. Raises RuntimeError if a rank has died."""
        lines = [answers.readline() for answers in self._answers]
        if not all(lines):
            end = self._log.read_text()[-4000:]
            self.close()
            raise RuntimeError(f"a rank died:\n{end}")
        return [json.loads(line) for line in lines]

"""Processes of ranks on the GPU that computes nothing."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch.distributed import TCPStore

from phalanx.testing.processes import start_python

LIMIT_SECONDS = 120.0


@dataclass(frozen=True)
class RankResult:
    """How a rank ended."""

    exit_code: int | None
    """None: it was killed after LIMIT_SECONDS."""
    output: str


def run_ranks(module: str, arguments: Sequence[str], world_size: int, folder: Path) -> list[RankResult]:
    """Run `python -m module` as ranks 0 to world_size - 1; returns how each ended. Their output is in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GLOO_SOCKET_IFNAME": "lo",
        "NULL_GPU_JOB": secrets.token_hex(8),
        "PYTHONFAULTHANDLER": "1",
    }
    processes = []
    logs = [folder / f"rank{rank}.log" for rank in range(world_size)]
    for rank, log in enumerate(logs):
        environment = os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        with log.open("w") as file:
            processes.append(start_python([sys.executable, "-m", module, *arguments], env=environment, stdout=file, stderr=file))
    deadline = time.monotonic() + LIMIT_SECONDS
    codes: list[int | None] = []
    for process in processes:
        try:
            codes.append(process.wait(timeout=max(0.1, deadline - time.monotonic())))
        except subprocess.TimeoutExpired:
            process.kill()
            codes.append(None)
    for left in Path("/dev/shm").glob(f"null-gpu-{shared['NULL_GPU_JOB']}"):
        left.unlink()
    return [RankResult(code, log.read_text(errors="replace")) for code, log in zip(codes, logs, strict=True)]


def describe_failures(results: Sequence[RankResult], num_lines: int = 25) -> str:
    """Return the last lines of the ranks that failed."""
    return "\n".join(
        "\n".join([f"-- rank {rank}: exit code {result.exit_code}", *result.output.splitlines()[-num_lines:]])
        for rank, result in enumerate(results)
        if result.exit_code != 0
    )

"""Processes of ranks on the null GPU."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch.distributed import TCPStore

from phalanx.testing.processes import start_python

LIMIT_SECONDS = 120.0


GRACE_SECONDS = 10.0
"""Time for other ranks to exit after a rank has failed."""


@dataclass(frozen=True)
class RankResult:
    """Exit of a rank."""

    exit_code: int
    output: str


def run_ranks(
    module: str,
    arguments: Sequence[str],
    world_size: int,
    folder: Path,
    variables: Mapping[str, str] | None = None,
) -> list[RankResult]:
    """Run `python -m module` as ranks 0 to world_size - 1, with more environment variables; return
    each rank's exit. Their output is in `folder`."""
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
    }
    processes = []
    logs = [folder / f"rank{rank}.log" for rank in range(world_size)]
    for rank, log in enumerate(logs):
        environment = os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} | dict(variables or {})
        with log.open("w") as file:
            processes.append(
                start_python([sys.executable, "-m", module, *arguments], env=environment, stdout=file, stderr=file)
            )
    wait_for_ranks(processes)
    codes = [process.returncode for process in processes]
    for leftover in Path("/dev/shm").glob(f"null-gpu-{shared['NULL_GPU_JOB']}"):
        leftover.unlink()
    return [RankResult(code, log.read_text(errors="replace")) for code, log in zip(codes, logs, strict=True)]


def wait_for_ranks(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Wait until all ranks have exited; hung ranks are aborted and write their stacks (faulthandler)."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        if any(process.returncode for process in processes):
            deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        time.sleep(0.02)
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGABRT)
            process.wait(timeout=GRACE_SECONDS)


def describe_failures(results: Sequence[RankResult], num_lines: int = 25) -> str:
    """Return the last lines of the ranks that failed."""
    return "\n".join(
        "\n".join([f"-- rank {rank}: exit code {result.exit_code}", *result.output.splitlines()[-num_lines:]])
        for rank, result in enumerate(results)
        if result.exit_code != 0
    )

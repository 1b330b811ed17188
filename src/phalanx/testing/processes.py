"""Processes of commands and of a run's ranks, for tests and benchmarks."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from phalanx.launch.fork_server import FIRST_STEP_MODULES
from phalanx.launch.warm_process import RANK_MODULES, ForkedProcess, WarmProcess, rank_of_process, start_warm_process

WAIT_SECONDS = 100.0
"""Maximum time for an event, on a machine with a high load."""
POLL_SECONDS = 0.03
"""Interval of polls, which read files of a run, or of /proc, and take processor time from it."""


@cache
def session_warm_process() -> WarmProcess | None:
    """Return the one warm process of this session, for commands and for ranks."""
    commands = "phalanx.launch.supervisor", "phalanx.cli.commands.train"
    return start_warm_process((*RANK_MODULES, *FIRST_STEP_MODULES, *commands))


def start_python(command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    """Start `python -m MODULE ARGUMENTS` as `subprocess.Popen` does, without the time for imports."""
    warm_process = session_warm_process()
    if warm_process is None:
        return subprocess.Popen(command, **options)
    return ForkedProcess(warm_process, command, **options)


def run_python(
    command: Sequence[str], timeout: float = WAIT_SECONDS, check: bool = False, **options: Any
) -> subprocess.CompletedProcess[Any]:
    """Run `python -m MODULE ARGUMENTS` as `subprocess.run` does, and capture its output."""
    with start_python(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options) as process:
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    completed = subprocess.CompletedProcess(command, process.returncode, stdout, stderr)
    if check:
        completed.check_returncode()
    return completed


def rank_pids(directory: Path) -> dict[int, int]:
    """Return the process ids of the ranks of a run, by rank."""
    pids = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            is_of_run = str(directory) in (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
            if is_of_run and (rank := rank_of_process(folder)) is not None:
                pids[rank] = int(folder.name)
    return pids


def warm_process_pid(launcher: int) -> int:
    """Return the process id of a launcher's warm process."""
    children = map(int, Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split())
    (pid,) = (pid for pid in children if Path(f"/proc/{pid}/comm").read_text() == "phalanx warm\n")
    return pid


def wait_until(condition: Callable[[], object], description: str, seconds: float = WAIT_SECONDS) -> None:
    """Wait until a condition is true; fail after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"timed out after {seconds:g} s: {description}"
        time.sleep(POLL_SECONDS)

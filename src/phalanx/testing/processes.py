"""Runs of `phalanx train` as tests and benchmarks see them from outside: the processes of their ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

WAIT_SECONDS = 100.0
"""Until something happens, on a machine that does much else."""


def rank_pids(directory: Path) -> dict[int, int]:
    """Process ids of the ranks of a run, by rank."""
    pids = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            argv = (folder / "cmdline").read_bytes().decode().split("\0")
            environment = dict(
                pair.split("=", 1) for pair in (folder / "environ").read_bytes().decode().split("\0") if "=" in pair
            )
        except (OSError, UnicodeDecodeError):
            continue
        if str(directory) in argv and "RANK" in environment:
            pids[int(environment["RANK"])] = int(folder.name)
    return pids


def wait_until(condition: Callable[[], object], description: str, seconds: float = WAIT_SECONDS) -> None:
    """Wait until something is true; fails after so many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not in {seconds:g} s: {description}"
        time.sleep(0.01)

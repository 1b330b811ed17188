"""Processes of the other ranks on this host: a stopped or missing rank cannot report itself."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

from phalanx.launch.warm_process import process_state, rank_of_process

PROC = Path("/proc")
GONE = "gone"


def sibling_process_states() -> dict[int, tuple[int, str]]:
    """Return the process and state of the other ranks on this host.

    A state is a letter as in /proc/PID/stat, or GONE with process 0. The result is empty if the starter does not
    identify the ranks, as torchrun does, or without /proc."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    first = int(os.environ.get("RANK", "0")) - local
    if size == 1 or not PROC.exists():
        return {}
    states = dict.fromkeys(range(first, first + size), (0, GONE))
    for folder in PROC.glob("[0-9]*"):
        with suppress(OSError, ValueError):
            state, parent = process_state(folder)
            if parent == os.getppid():
                rank = rank_of_process(folder)
                if rank in states:
                    states[rank] = int(folder.name), state
    is_identified = states.pop(first + local) != (0, GONE)
    return states if is_identified else {}


def resume_stopped(processes: dict[int, tuple[int, str]]) -> None:
    """Continue stopped ranks so that they can exit with the run: they receive no other signal."""
    for process, state in processes.values():
        if state == "T":
            with suppress(OSError):
                os.kill(process, signal.SIGCONT)

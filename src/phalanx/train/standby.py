"""A rank that the layout does not use: it waits until the training ranks exit."""

from __future__ import annotations

import os
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from threading import Event, Thread

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from phalanx.launch.process import die_with_launcher, handling_signals
from phalanx.runs.create import is_finished
from phalanx.spec.errors import EXIT_STOPPED

CONNECT_TIMEOUT = timedelta(minutes=5)
"""Maximum time for a standby rank to start and to reach the store of rank 0."""


def wait_for_standby_ranks(num_ranks: int) -> None:
    """Wait until every rank from `num_ranks` on has connected to the store of rank 0.

    A rank that starts after the end of a short run could not connect to the store."""
    if standby_keys := [f"standby/{rank}" for rank in range(num_ranks, int(os.environ["WORLD_SIZE"]))]:
        with suppress(dist.DistError):
            _connect_to_rank_0().wait(standby_keys, CONNECT_TIMEOUT)


def run_standby_rank(directory: Path) -> int:
    """Wait until the training ranks exit or a signal arrives, and return the exit code."""
    die_with_launcher()
    run_over = Event()

    # This runs in a thread, because the main thread handles signals.
    def wait_for_end() -> None:
        with suppress(dist.DistError):
            store = _connect_to_rank_0()
            store.set(f"standby/{os.environ['RANK']}", "")
            store.wait(["over"], timedelta(days=365))
        run_over.set()

    Thread(target=wait_for_end, daemon=True).start()
    with handling_signals(lambda _: run_over.set()):
        run_over.wait()
    return 0 if is_finished(directory) else EXIT_STOPPED


def _connect_to_rank_0() -> TCPStore:
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(*address, is_master=False, timeout=CONNECT_TIMEOUT)

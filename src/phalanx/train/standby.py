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
from phalanx.runs.checkpoints import is_finished
from phalanx.runs.create import read_run_directory
from phalanx.spec.errors import EXIT_STOPPED


def run_standby_rank(directory: Path) -> int:
    """Of a rank that no layout has a place for: wait until the others have ended, or are told to; returns the exit
    code."""
    die_with_launcher()
    steps, run_over = read_run_directory(directory)[0].training.steps, Event()

    def wait_for_end() -> None:  # beside the main thread, which hears signals meanwhile
        with suppress(dist.DistError):
            address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            TCPStore(*address, is_master=False, timeout=timedelta(minutes=5)).wait(["over"], timedelta(days=365))
        run_over.set()

    Thread(target=wait_for_end, daemon=True).start()
    with handling_signals(lambda _: run_over.set()):
        run_over.wait()
    return 0 if is_finished(directory, steps) else EXIT_STOPPED

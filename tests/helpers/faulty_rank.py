"""Rank of a run with a fault: `python -m tests.helpers.faulty_rank FAULT RUN_DIR`. In
the fourth step, rank 1 does something wrong."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from phalanx.launch.process import exit_rank
from phalanx.spec.log import log_to_stderr
from phalanx.train.checkpoint import checkpointer
from phalanx.train.rank_options import RankOptions
from phalanx.train.trainer import Trainer
from phalanx.train.worker import run_rank

FAULTY_RANK, FAULT_STEP = 1, 3


def arrive_late() -> None:
    """Arrive far too late at the collectives of a step."""
    time.sleep(1000)


def pause_all_ranks() -> None:
    """Pause all ranks for longer than the watchdog's timeout, but not longer than that of a collective."""
    time.sleep(5.5)


def mismatch_shape() -> None:
    """Call one more collective on all ranks, with another size on the faulty rank; gloo aborts that rank."""
    dist.all_reduce(torch.ones(1_000 if dist.get_rank() == FAULTY_RANK else 400_000))


def skip_collective() -> None:
    """Call one more collective on all ranks except the faulty one."""
    if dist.get_rank() != FAULTY_RANK:
        dist.all_reduce(torch.ones(4))


def reorder_collectives() -> None:
    """Call two more collectives, in another order on the faulty rank."""
    tensor, parts = torch.ones(4), [torch.empty(4) for _ in range(dist.get_world_size())]
    if dist.get_rank() == FAULTY_RANK:
        dist.all_gather(parts, tensor)
        dist.all_reduce(tensor)
    else:
        dist.all_reduce(tensor)
        dist.all_gather(parts, tensor)


def reorder_messages() -> None:
    """Send two messages to the faulty rank, which expects them in another order: gloo matches messages by tag."""
    first, second = torch.ones(4), torch.ones(8)
    if dist.get_rank() == 0:
        works = [dist.isend(first, FAULTY_RANK, tag=1), dist.isend(second, FAULTY_RANK, tag=2)]
    else:
        works = [dist.irecv(second, 0, tag=2), dist.irecv(first, 0, tag=1)]
    for work in works:
        work.wait()


def exhaust_address_space() -> None:
    """Allocate more than the address space of this process in one call."""
    before = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (before + 2**28, before + 2**28))
    torch.empty(2**30, dtype=torch.uint8)


def exhaust_cgroup_memory() -> None:
    """Allocate more than the memory of the cgroup in small parts."""
    blocks = []
    while True:
        blocks.append(torch.ones(2**24))


def abort_in_library() -> None:
    """Call the C library's abort, which lets other threads run, unlike Python's own abort."""
    ctypes.CDLL(None).abort()


def slow_down_disk() -> None:
    """On all ranks, let writes of checkpoints take longer than the watchdog's timeout."""
    checkpointer.sync = lambda file: time.sleep(9.0)


def flip_parameter_bit(trainer: Trainer) -> None:
    """Flip one bit of the last parameter."""
    *_, last = trainer.strategy.trainable_parameters.values()
    last.detach().view(-1).view(torch.uint8)[0] ^= 4


def signal_during_resume() -> None:
    """Send a stop signal to a rank that reads the run directory."""
    resume = Trainer.resume

    def told(self: Trainer) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return resume(self)

    Trainer.resume = told  # type: ignore[method-assign]


SINGLE_RANK_FAULTS = {
    "late": arrive_late,
    "memory": exhaust_address_space,
    "much": exhaust_cgroup_memory,
    "abort": os.abort,
    "library": abort_in_library,
}
ALL_RANK_FAULTS = {
    "pause": pause_all_ranks,
    "disk": slow_down_disk,
    "shape": mismatch_shape,
    "skipped": skip_collective,
    "order": reorder_collectives,
    "messages": reorder_messages,
}


def main(fault: str, directory: str) -> None:
    """Train with a fault."""
    log_to_stderr()
    step = Trainer.launch_step

    def faulty(self: Trainer, batches: Iterator[Any]) -> Any:
        if self.step == FAULT_STEP:
            if fault in ALL_RANK_FAULTS:
                ALL_RANK_FAULTS[fault]()
            elif fault == "bit" and dist.get_rank() == FAULTY_RANK:
                flip_parameter_bit(self)
            elif fault in SINGLE_RANK_FAULTS and dist.get_rank() == FAULTY_RANK:
                SINGLE_RANK_FAULTS[fault]()
        return step(self, batches)

    Trainer.launch_step = faulty  # type: ignore[method-assign]
    if fault == "signaled early":
        signal_during_resume()
    exit_rank(run_rank(Path(directory), RankOptions(resume=False)))


if __name__ == "__main__":
    main(*sys.argv[1:])

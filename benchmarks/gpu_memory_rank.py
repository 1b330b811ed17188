"""Measure the peak that PyTorch's allocator allocates and reserves in a step of one rank, on a null GPU.

    python -m benchmarks.gpu_memory_rank ROW        # started by `benchmarks.gpu_memory`, which preloads the libraries

A null GPU has no numbers, so the values that a step depends on are fixed: experts are balanced, and every row is one
document.
"""

from __future__ import annotations

import json
import os
import sys

import torch
import torch.distributed as dist

from benchmarks.gpu_memory_runs import Row, make_run
from phalanx.parallel.mesh import build_mesh
from phalanx.train.learner import Learner
from phalanx.verify.dry_run import run_step
from tests.null_gpu.given_numbers import give_numbers

WARMUP_STEPS = 3
"""DDP rebuilds its buckets in the second step."""


class LonelyStore(dist.Store):
    """Store that contains every key that a rank waits for: the identifiers of NCCL communicators."""

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes | str) -> None:
        self.values[key] = value if isinstance(value, bytes) else value.encode()

    def get(self, key: str) -> bytes:
        return self.values.get(key, bytes(128))

    def wait(self, keys: list[str], timeout: object = None) -> None:
        pass

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def add(self, key: str, amount: int) -> int:
        self.values[key] = str(int(self.values.get(key, b"0")) + amount).encode()
        return int(self.values[key])


def run_steps(row: Row) -> dict[str, int]:
    """Run steps of a rank in this process; return the peak bytes of the last step."""
    give_numbers()
    dist.distributed_c10d._store_based_barrier = lambda *arguments, **named: None
    torch.cuda.set_device(0)
    store = LonelyStore()  # the Python object must outlive the process group
    if row.world_size > 1:
        dist.init_process_group("nccl", store=store, rank=row.rank, world_size=row.world_size)
    run = make_run(row)
    mesh = build_mesh(run.layout, row.world_size, "cuda")
    learner = Learner(run, mesh, torch.device("cuda", 0), lambda name, shape: torch.empty(shape))
    for _ in range(WARMUP_STEPS):
        run_step(learner)
    torch.cuda.reset_peak_memory_stats()
    run_step(learner)
    return {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}


if __name__ == "__main__":
    print(json.dumps(run_steps(Row(**json.loads(sys.argv[1])))), flush=True)
    os._exit(0)  # the watchdog thread of the process group never ends

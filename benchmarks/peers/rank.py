"""Run one rank of one or several trainers, which executes requested steps and reports their times.

    RANK=... WORLD_SIZE=... python -m benchmarks.peers.rank SHAPE LAYOUT DATA_PREFIX TRAINER...

Each line of standard input contains a trainer and a number of steps. The answer is a `Block`, as a line of JSON. With
"bytes" instead of a number, the rank runs one step and answers with the bytes that it sent.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict

import torch
import torch.distributed as dist

from benchmarks.peers.launch import Block
from benchmarks.shapes import SHAPES
from phalanx.data.indexed_dataset import IndexedDataset
from phalanx.parallel.comm.device_memory import peak_memory_bytes
from phalanx.train.profiling.collective_recorder import CollectiveRecorder

Step = Callable[[], float]


def main(shape: str, layout: str, data: str, names: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    dataset = IndexedDataset(data)
    trainers = {
        name: importlib.import_module(f"benchmarks.peers.{name}").build(SHAPES[shape], layout, dataset)
        for name in names
    }
    answer("ready")
    for line in sys.stdin:
        name, steps = line.split()
        answer(sent(trainers[name]) if steps == "bytes" else asdict(measure(trainers[name], int(steps))))
    os._exit(0)  # gloo's threads may abort a normal exit


def measure(step: Step, count: int) -> Block:
    """Run `count` steps, which start at the same time on all ranks."""
    seconds, cpu_seconds, losses = [], [], []
    for _ in range(count):
        dist.barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        losses.append(step())
        seconds.append(time.perf_counter() - wall)
        cpu_seconds.append(time.process_time() - cpu)
    return Block(seconds, cpu_seconds, losses, peak_memory_bytes(torch.device("cpu")))


def sent(step: Step) -> float:
    """Return the bytes that the requested collectives of a step send, computed for a ring."""
    with CollectiveRecorder() as recorder:
        step()
    return sum(call.sent_bytes for call in recorder.calls)


def answer(value: object) -> None:
    """Write one line to the parent, in a file of its own, because trainers print to standard output."""
    with os.fdopen(os.dup(int(os.environ["ANSWERS"])), "w") as file:
        file.write(json.dumps(value) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:])

"""One rank of one or several trainers, that does steps when told and says what they took.

    RANK=... WORLD_SIZE=... python -m benchmarks.peers.rank SHAPE LAYOUT DATA_PREFIX TRAINER...

Each line of standard input names a trainer and a number of steps; a `Block` answers it, as a line of JSON. Instead of a
number, "bytes" does one step and is answered with what the rank sent in it.
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
    os._exit(0)  # gloo's threads may abort an orderly end


def measure(step: Step, count: int) -> Block:
    """Do so many steps, all ranks from the same moment on."""
    seconds, cpu_seconds, losses = [], [], []
    for _ in range(count):
        dist.barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        losses.append(step())
        seconds.append(time.perf_counter() - wall)
        cpu_seconds.append(time.process_time() - cpu)
    return Block(seconds, cpu_seconds, losses, peak_memory_bytes(torch.device("cpu")))


def sent(step: Step) -> float:
    """Bytes that a step sends around rings: what its collectives were asked for."""
    with CollectiveRecorder() as recorder:
        step()
    return sum(call.sent_bytes for call in recorder.calls)


def answer(value: object) -> None:
    """One line to whoever asks; trainers print to standard output too, so ours has a file of its own."""
    with os.fdopen(os.dup(int(os.environ["ANSWERS"])), "w") as file:
        file.write(json.dumps(value) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:])

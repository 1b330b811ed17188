"""Every way of data parallelism: speed, memory and traffic, beside DeepSpeed and plain PyTorch.

    python -m benchmarks.data_parallel        # prints the table and writes docs/results/benchmarks/data_parallel.md

Two ranks with one thread each train a shape of `shapes.py` in fp32. Every trainer has its own two processes, and they
take turns: a few steps of one, a few of the next.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median

from benchmarks.overhead import NAMES, OURS, PLAIN, Round, in_turn, peak_bytes, ratio, speed
from benchmarks.peers.install import PEERS, install
from benchmarks.peers.launch import Ranks
from benchmarks.shapes import LAYOUTS, SHAPES
from phalanx.data.prepare import prepare
from phalanx.spec.run import DataSpec

DEEPSPEED = "deepspeed_zero"
STAGES = {"ddp": "ZeRO-0", "zero1": "ZeRO-1", "zero2": "ZeRO-2", "fsdp": "ZeRO-3"}
"""Layouts that the others have too, and DeepSpeed's name for them."""
GOAL = 1.0
PAGE = Path(__file__).parents[1] / "docs" / "results" / "benchmarks" / "data_parallel.md"


@dataclass(frozen=True)
class Measured:
    """A layout of one shape, by trainer."""

    shape: str
    layout: str
    rounds: dict[str, list[Round]]
    sent_bytes: dict[str, float]


def measure(shape: str, layout: str, data: str, peers: Path, rounds: int, steps: int) -> Measured:
    """Time the trainers that have this layout."""
    ours = Path(sys.executable)
    trainers = [OURS, PLAIN, DEEPSPEED] if layout in STAGES else [OURS]
    with ExitStack() as stack:
        ranks = {}
        for name in trainers:
            ranks[name] = Ranks(peers if name == DEEPSPEED else ours, shape, layout, data, [name])
            stack.callback(ranks[name].close)
        taken = in_turn(ranks, rounds, steps)
        return Measured(shape, layout, taken, {name: held.sent_bytes(name) for name, held in ranks.items()})


def cpu_seconds(rounds: Sequence[Round]) -> float:
    """CPU time of a step, of all ranks together: the median over rounds."""
    return median(sum(median(block.cpu_seconds) for block in blocks) for blocks in rounds)


def cpu_ratio(ours: Sequence[Round], theirs: Sequence[Round]) -> float:
    """Their CPU time for the same step, in ours: the median over neighbouring rounds."""
    return median(cpu_seconds([b]) / cpu_seconds([a]) for a, b in zip(ours, theirs, strict=True))


def table(results: Sequence[Measured]) -> str:
    """All of it, in Markdown."""
    lines = [
        "| shape | layout | trainer | tokens/s | CPU ms per token | memory of a rank, MB | sent per step, MB "
        "| Phalanx / it: tokens/s | tokens per CPU second |",
        "|---|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for result in results:
        for name, rounds in result.rounds.items():
            tokens, ours = SHAPES[result.shape].tokens, result.rounds[OURS]
            wall, cpu = ratio(ours, rounds).wall, cpu_ratio(ours, rounds)
            against = "| |" if name == OURS else f"| {wall:.3f} | {cpu:.3f} |"
            lines.append(
                f"| {result.shape} | {result.layout} | {NAMES[name]} | {speed(rounds, tokens).wall:,.0f} "
                f"| {1e3 * cpu_seconds(rounds) / tokens:.3f} "
                f"| {peak_bytes(rounds) / 1e6:,.0f} | {result.sent_bytes[name] / 1e6:,.1f} {against}"
            )
    return "\n".join(lines)


def page(results: Sequence[Measured], rounds: int, steps: int) -> str:
    """What is written to docs/."""
    shapes = "\n".join(
        f"- `{name}`: {s.layers} layers, width {s.width}, vocabulary {s.vocab:,}; {s.sequences} sequences of "
        f"{s.sequence} tokens per update, {s.micro_batch} per rank and forward pass, so {s.accumulation} micro-batches."
        for name, s in SHAPES.items()
        if name in {result.shape for result in results}
    )
    return f"""# Data parallelism: every way of it

{table(results)}

Goal: a ratio of at least {GOAL} against DeepSpeed's stage, in wall time and in CPU time per token. CPU time is that of
all ranks together. Ratios are medians over neighbouring rounds.

`fsdp` is Phalanx's `zero3`. Plain PyTorch is DDP, DDP with `ZeroRedundancyOptimizer`, `fully_shard` without resharding
after the forward pass, and with it; both of the latter keep whole gradients until the last micro-batch, which sends
them once per update; Phalanx's and DeepSpeed's stages 2 and 3 split them at every micro-batch, which is what saves
their memory. Memory is the most that the process held (resident, with Python and PyTorch). Sent are the bytes of the
collectives asked for, around a ring; what DeepSpeed sends outside of torch.distributed's dispatcher is not seen.
The parameter server has one server and one worker here, so only one rank computes; HSDP has four ranks on the same
cores, two that share a copy and two copies.

## How

{shapes}
- Two ranks of one thread on gloo; fp32, fused AdamW, gradient clipping; the same batches and the same initial weights.
- {rounds} rounds of {steps} steps of each trainer after two to warm up; medians.
- torch {version("torch")}, {", ".join(PEERS)}; {platform.machine()}, {os.cpu_count()} cores, Python
  {platform.python_version()}.
- Again: `python -m benchmarks.data_parallel --rounds {rounds}`.
"""


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser("benchmarks.data_parallel")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="steps of a trainer in a round")
    parser.add_argument("--page", type=Path, default=PAGE, help="where to write")
    asked = parser.parse_args()
    peers = install()
    data = prepare(DataSpec(tokenizer="bytes")).train
    results = []
    for shape in asked.shapes:
        for layout in asked.layouts:
            results.append(measure(shape, layout, data, peers, asked.rounds, asked.steps))
            print(table(results[-1:]), flush=True)
    asked.page.parent.mkdir(parents=True, exist_ok=True)
    asked.page.write_text(page(results, asked.rounds, asked.steps))


if __name__ == "__main__":
    main()

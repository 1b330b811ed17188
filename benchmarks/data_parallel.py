"""Compare the speed, memory and traffic of data-parallel strategies with DeepSpeed and plain PyTorch.

    python -m benchmarks.data_parallel        # prints the table and writes docs/results/benchmarks/data_parallel.md

Two ranks with one thread each train a shape of `shapes.py` in fp32. Every trainer has its own two processes, and the
trainers take turns every few steps.
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
from benchmarks.pages import write_results
from benchmarks.peers.install import PEERS, install
from benchmarks.peers.launch import Ranks
from benchmarks.shapes import LAYOUTS, SHAPES
from phalanx.data.prepare import prepare
from phalanx.spec.run import DataSpec

DEEPSPEED = "deepspeed_zero"
STAGES = {"ddp": "ZeRO-0", "zero1": "ZeRO-1", "zero2": "ZeRO-2", "fsdp": "ZeRO-3"}
"""Layouts that the other trainers also have, and DeepSpeed's names for them."""
GOAL = 1.0
PAGE = Path(__file__).parents[1] / "docs" / "results" / "benchmarks" / "data_parallel.md"


@dataclass(frozen=True)
class Measured:
    """Measurements of one layout of one shape, by trainer."""

    shape: str
    layout: str
    rounds: dict[str, list[Round]]
    sent_bytes: dict[str, float]


def measure(shape: str, layout: str, data: str, peers: Path, rounds: int, steps: int) -> Measured:
    """Time the trainers that have this layout."""
    python = Path(sys.executable)
    trainers = [OURS, PLAIN, DEEPSPEED] if layout in STAGES else [OURS]
    with ExitStack() as stack:
        ranks = {}
        for name in trainers:
            ranks[name] = Ranks(peers if name == DEEPSPEED else python, shape, layout, data, [name])
            stack.callback(ranks[name].close)
        rounds_by_trainer = in_turn(ranks, rounds, steps)
        return Measured(
            shape,
            layout,
            rounds_by_trainer,
            {name: trainer_ranks.sent_bytes(name) for name, trainer_ranks in ranks.items()},
        )


def cpu_seconds(rounds: Sequence[Round]) -> float:
    """Return the CPU time of a step, summed over ranks: the median over rounds."""
    return median(sum(median(block.cpu_seconds) for block in blocks) for blocks in rounds)


def cpu_ratio(ours: Sequence[Round], theirs: Sequence[Round]) -> float:
    """Return their CPU time for a step relative to ours: the median over neighboring rounds."""
    return median(cpu_seconds([b]) / cpu_seconds([a]) for a, b in zip(ours, theirs, strict=True))


def table(results: Sequence[Measured]) -> str:
    """Format all results as a Markdown table."""
    lines = [
        "| shape | layout | trainer | tokens/s | CPU ms per token | memory per rank, MB | sent per step, MB "
        "| Phalanx / trainer: tokens/s | Phalanx / trainer: tokens per CPU second |",
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
    """Return the page of the benchmark."""
    shapes = "\n".join(
        f"- `{name}`: {s.layers} layers, width {s.width}, vocabulary {s.vocab:,}; {s.sequences} sequences of "
        f"{s.sequence} tokens per update, {s.micro_batch} per rank and forward pass, so {s.accumulation} micro-batches."
        for name, s in SHAPES.items()
        if name in {result.shape for result in results}
    )
    return f"""# Data-parallel strategies

{table(results)}

Goal: a ratio of at least {GOAL} to the same stage of DeepSpeed, in wall time and in CPU time per token. CPU time is the
sum over all ranks. Ratios are medians over neighboring rounds.

`fsdp` is Phalanx's `zero3`. The plain loop uses DDP (`ddp`) and DDP with `ZeroRedundancyOptimizer` (`zero1`). It uses
`fully_shard` without resharding after the forward pass (`zero2`) and with resharding (`fsdp`). With `fully_shard`, the
plain loop keeps full gradients until the last micro-batch and sends them once per update. Stages 2 and 3 of Phalanx and
DeepSpeed shard the gradients at every micro-batch, which saves memory.

Memory is the peak resident memory of the process, including Python and PyTorch. Sent bytes are those of the requested
collectives, computed for a ring. Bytes that DeepSpeed sends outside the dispatcher of torch.distributed are not
counted. The parameter server has one server and one worker, so only one rank computes. HSDP has four ranks on the same
cores: two replicas, each sharded over two ranks.

## Setup

{shapes}
- Two ranks with one thread each on gloo; fp32, fused AdamW, gradient clipping, equal batches and equal initial weights.
- Medians over {rounds} rounds of {steps} steps per trainer, after two warm-up steps.
- torch {version("torch")}, {", ".join(PEERS)}; {platform.machine()}, {os.cpu_count()} cores, Python
  {platform.python_version()}.
- Written by `python -m benchmarks.data_parallel --rounds {rounds}`.
"""


def main() -> None:
    """Measure, print the table and write the page."""
    parser = argparse.ArgumentParser("benchmarks.data_parallel")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="steps per trainer and round")
    parser.add_argument("--page", type=Path, default=PAGE, help="file to write")
    args = parser.parse_args()
    peers = install()
    data = prepare(DataSpec(tokenizer="bytes")).train
    results = []
    for shape in args.shapes:
        for layout in args.layouts:
            results.append(measure(shape, layout, data, peers, args.rounds, args.steps))
            print(table(results[-1:]), flush=True)
    args.page.parent.mkdir(parents=True, exist_ok=True)
    write_results(args.page, page(results, args.rounds, args.steps))


if __name__ == "__main__":
    main()

"""Measure the overhead of Phalanx over a plain PyTorch loop, and the speed of other trainers.

    python -m benchmarks.overhead        # prints the tables and writes docs/results/benchmarks/overhead.md

Two ranks with one thread each train the shapes of `shapes.py` in fp32. First, Phalanx and the plain loop take turns in
the same two processes. Then, all trainers take turns, each in its own two processes.
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

from benchmarks.pages import write_results
from benchmarks.peers.install import PEERS, install
from benchmarks.peers.launch import Block, Ranks
from benchmarks.shapes import LAYOUTS, SHAPES
from phalanx.data.prepare import prepare
from phalanx.spec.run import DataSpec

OURS, PLAIN = "phalanx_trainer", "plain"
NAMES = {OURS: "Phalanx", PLAIN: "plain loop", "deepspeed_zero": "DeepSpeed", "olmo_core": "OLMo-core"}
WARM_UP = 2
SPEED_GOAL, MEMORY_GOAL = 0.98, 1.05
PAGE = Path(__file__).parents[1] / "docs" / "results" / "benchmarks" / "overhead.md"

Round = list[Block]
"""A few steps of one trainer, by rank."""


@dataclass(frozen=True)
class Speed:
    """A trainer's medians over rounds, in tokens per second over all ranks."""

    wall: float
    cpu_bound: float
    """Tokens per CPU second of the busiest rank: the speed without waiting, which other programs hardly change."""


@dataclass(frozen=True)
class Comparison:
    """Measurements of one shape under one layout."""

    shape: str
    layout: str
    together: dict[str, list[Round]]
    """Rounds of Phalanx and of the plain loop in the same processes."""
    apart: dict[str, list[Round]]
    """Rounds of every trainer in its own processes."""


def compare(shape: str, layout: str, data: str, peers: Path, rounds: int, steps: int) -> Comparison:
    """Time the trainers of one shape and layout."""
    ours = Path(sys.executable)
    together = Ranks(ours, shape, layout, data, [OURS, PLAIN])
    try:
        pair = in_turn({OURS: together, PLAIN: together}, rounds, steps)
    finally:
        together.close()
    with ExitStack() as stack:
        apart = {}
        for name in NAMES:
            apart[name] = Ranks(ours if name in (OURS, PLAIN) else peers, shape, layout, data, [name])
            stack.callback(apart[name].close)
        return Comparison(shape, layout, pair, in_turn(apart, rounds, steps))


def in_turn(trainers: dict[str, Ranks], rounds: int, steps: int) -> dict[str, list[Round]]:
    """Run `steps` steps of every trainer in each round, while the other trainers wait."""
    for name, ranks in trainers.items():
        ranks.run(name, WARM_UP)
    rounds_by_trainer: dict[str, list[Round]] = {name: [] for name in trainers}
    for _ in range(rounds):
        for name, ranks in trainers.items():
            rounds_by_trainer[name].append(ranks.run(name, steps))
    return rounds_by_trainer


def round_speed(blocks: Round, tokens: int) -> Speed:
    """Return the speed of one round, in which a step takes as long as its slowest rank."""
    wall = median(map(max, zip(*(block.seconds for block in blocks), strict=True)))
    return Speed(tokens / wall, tokens / max(median(block.cpu_seconds) for block in blocks))


def speed(rounds: Sequence[Round], tokens: int) -> Speed:
    """Return the median speeds over rounds."""
    speeds = [round_speed(blocks, tokens) for blocks in rounds]
    return Speed(median(s.wall for s in speeds), median(s.cpu_bound for s in speeds))


def ratio(ours: Sequence[Round], theirs: Sequence[Round]) -> Speed:
    """Return our speed relative to theirs: the median over neighboring rounds."""
    pairs = [(round_speed(a, 1), round_speed(b, 1)) for a, b in zip(ours, theirs, strict=True)]
    return Speed(median(a.wall / b.wall for a, b in pairs), median(a.cpu_bound / b.cpu_bound for a, b in pairs))


def peak_bytes(rounds: Sequence[Round]) -> int:
    """Return the peak memory of a rank."""
    return max(block.peak_bytes for block in rounds[-1])


def loss_difference(ours: Sequence[Round], theirs: Sequence[Round]) -> float:
    """Return the largest relative difference between the losses of the same steps."""
    losses = ([loss for blocks in rounds for loss in blocks[0].losses] for rounds in (ours, theirs))
    return max(abs(a - b) / b for a, b in zip(*losses, strict=True))


def overhead_table(results: Sequence[Comparison]) -> str:
    """Format the comparison of Phalanx and the plain loop as a Markdown table."""
    lines = [
        "| shape | layout | Phalanx, tokens/s | plain, tokens/s | ratio | ratio of CPU-bound speeds "
        "| peak memory, Phalanx / plain | difference of losses |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for result in results:
        tokens = SHAPES[result.shape].tokens
        ours, plain = result.together[OURS], result.together[PLAIN]
        share = ratio(ours, plain)
        memory = peak_bytes(result.apart[OURS]) / peak_bytes(result.apart[PLAIN])
        lines.append(
            f"| {result.shape} | {result.layout} | {speed(ours, tokens).wall:,.0f} | {speed(plain, tokens).wall:,.0f} "
            f"| {share.wall:.3f} | {share.cpu_bound:.3f} | {memory:.3f} | {loss_difference(ours, plain):.0e} |"
        )
    return "\n".join(lines)


def peers_table(results: Sequence[Comparison]) -> str:
    """Format the measurements of all trainers as a Markdown table."""
    lines = [
        "| shape | layout | trainer | tokens/s | CPU-bound tokens/s | peak memory per rank, MB |",
        "|---|---|---|---:|---:|---:|",
    ]
    for result in results:
        for name, rounds in result.apart.items():
            result_speed = speed(rounds, SHAPES[result.shape].tokens)
            lines.append(
                f"| {result.shape} | {result.layout} | {NAMES[name]} "
                f"| {result_speed.wall:,.0f} | {result_speed.cpu_bound:,.0f} "
                f"| {peak_bytes(rounds) / 1e6:,.0f} |"
            )
    return "\n".join(lines)


def page(results: Sequence[Comparison], rounds: int, steps: int) -> str:
    """Return the page of the benchmark."""
    shapes = "\n".join(
        f"- `{name}`: {s.layers} layers, width {s.width}, {s.heads} heads ({s.kv_heads} key/value), ffn {s.ffn}, "
        f"vocabulary {s.vocab:,}; {s.sequences} sequences of {s.sequence} tokens per update, {s.micro_batch} per rank "
        f"and forward pass."
        for name, s in SHAPES.items()
    )
    return f"""# Overhead of Phalanx compared with a plain PyTorch loop and other trainers

## Phalanx and the plain loop in the same two processes, in turn

{overhead_table(results)}

Goals: a ratio of at least {SPEED_GOAL}, and a peak memory of at most {MEMORY_GOAL} times that of the plain loop. Memory
is measured in separate processes. The ratio is the median over neighboring rounds. `ddp` is `DistributedDataParallel`.
`fsdp` is `zero3` in Phalanx, and `fully_shard` of each block and the root with its defaults in the plain loop.

## Each trainer in its own two processes, in turn

{peers_table(results)}

The CPU-bound speed is the number of tokens per CPU second of the busiest rank. Other programs hardly change it, and it
does not include waiting. In DeepSpeed, `fsdp` is ZeRO-3 and `ddp` is ZeRO-0.

## Setup

{shapes}
- Two ranks with one thread each on gloo; fp32, fused AdamW, gradient clipping, no recomputation, untied output head.
- All trainers have equal batches, from the source of the Python library as bytes, and the environment variables of
  Phalanx's launcher. Initial weights are equal except for OLMo-core, which has its own model.
- Phalanx runs the step of its trainer with its logs. The plain loop is `benchmarks/peers/plain.py`.
- {rounds} rounds of {steps} steps per trainer, after {WARM_UP} warm-up steps. Figures are medians over the steps of a
  round and over the rounds.
- torch {version("torch")}, {", ".join(PEERS)}; {platform.machine()}, {os.cpu_count()} cores, Python
  {platform.python_version()}.
- Written by `python -m benchmarks.overhead`.
"""


def main() -> None:
    """Measure, print the table and write the page."""
    parser = argparse.ArgumentParser("benchmarks.overhead")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=["ddp", "fsdp"])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=3, help="steps per trainer and round")
    args = parser.parse_args()
    peers = install()
    data = prepare(DataSpec(tokenizer="bytes")).train
    results = []
    for shape in args.shapes:
        for layout in args.layouts:
            results.append(compare(shape, layout, data, peers, args.rounds, args.steps))
            print(f"\n{overhead_table(results[-1:])}\n\n{peers_table(results[-1:])}", flush=True)
    write_results(PAGE, page(results, args.rounds, args.steps))


if __name__ == "__main__":
    main()

"""Compare tensor, pipeline and context parallelism on two ranks with plain PyTorch and OLMo-core.

    python -m benchmarks.model_parallel        # prints the table and writes docs/results/benchmarks/model_parallel.md

Two ranks with one thread each train a shape of `shapes.py` in fp32. Every trainer has its own two processes, and the
trainers take turns every few steps. Data parallelism with the same batch takes turns with them, as the limit.
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

from benchmarks.data_parallel import cpu_ratio, cpu_seconds
from benchmarks.overhead import NAMES, OURS, Round, in_turn, peak_bytes, ratio, speed
from benchmarks.pages import write_results
from benchmarks.peers.install import PEERS, install
from benchmarks.peers.launch import Ranks
from benchmarks.shapes import SHAPES
from phalanx.data.prepare import prepare
from phalanx.spec.run import DataSpec

PLAIN, OLMO = "plain_model", "olmo_core"
LAYOUTS = {
    "tp2": [("tp2, no sequence parallelism", OURS), ("tp2", OURS), ("tp2", PLAIN), ("tp2", OLMO)],
    "pp2": [("pp2", OURS), ("pp2", PLAIN)],
    "cp2": [("cp2", OURS), ("cp2", PLAIN)],
}
"""Entries by layout: a layout name of `shapes.py` and a trainer. The first entry is compared with the others."""
LIMIT = ("ddp", OURS)
PAGE = Path(__file__).parents[1] / "docs" / "results" / "benchmarks" / "model_parallel.md"

Entry = tuple[str, str]


@dataclass(frozen=True)
class Measured:
    """Measurements of one layout of one shape: the rounds of each entry."""

    shape: str
    rounds: dict[Entry, list[Round]]


def measure(shape: str, layout: str, data: str, peers: Path, rounds: int, steps: int) -> Measured:
    """Time the entries of this layout."""
    with ExitStack() as stack:
        ranks: dict[Entry, Ranks] = {}
        for entry in [*LAYOUTS[layout], LIMIT]:
            name, trainer = entry
            ranks[entry] = Ranks(peers if trainer == OLMO else Path(sys.executable), shape, name, data, [trainer])
            stack.callback(ranks[entry].close)
        by_number = {
            str(number): Turn(entry_ranks, entry[1]) for number, (entry, entry_ranks) in enumerate(ranks.items())
        }
        rounds_by_number = in_turn(by_number, rounds, steps)
        return Measured(shape, dict(zip(ranks, rounds_by_number.values(), strict=True)))


@dataclass(frozen=True)
class Turn:
    """Adapter of `in_turn` for ranks with one trainer, which are identified by a number."""

    ranks: Ranks
    trainer: str

    def run(self, _: str, steps: int) -> Round:
        return self.ranks.run(self.trainer, steps)


def table(results: Sequence[Measured]) -> str:
    """Format all results as a Markdown table."""
    lines = [
        "| shape | layout | trainer | tokens/s | relative to data parallelism | CPU ms per token | memory per rank, MB "
        "| Phalanx / trainer: tokens/s | Phalanx / trainer: tokens per CPU second |",
        "|---|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for result in results:
        tokens = SHAPES[result.shape].tokens
        (first, ours), *_ = result.rounds.items()
        limit = result.rounds[LIMIT]
        for entry, rounds in result.rounds.items():
            against = f"{ratio(ours, rounds).wall:.3f} | {cpu_ratio(ours, rounds):.3f}" if entry != first else " | "
            lines.append(
                f"| {result.shape} | {entry[0]} | {NAMES.get(entry[1], 'plain PyTorch')} "
                f"| {speed(rounds, tokens).wall:,.0f} | {ratio(rounds, limit).wall:.3f} "
                f"| {1e3 * cpu_seconds(rounds) / tokens:.3f} | {peak_bytes(rounds) / 1e6:,.0f} | {against} |"
            )
    return "\n".join(lines)


def page(results: Sequence[Measured], rounds: int, steps: int) -> str:
    """Return the page of the benchmark."""
    shapes = "\n".join(
        f"- `{name}`: {s.layers} layers, width {s.width}, vocabulary {s.vocab:,}; {s.sequences} sequences of "
        f"{s.sequence} tokens per update, {s.micro_batch} in a micro-batch."
        for name, s in SHAPES.items()
        if name in {result.shape for result in results}
    )
    return f"""# Tensor, pipeline and context parallelism on two ranks

{table(results)}

Goal: a ratio of at least 1 to plain PyTorch and OLMo-core, in wall time and in CPU time per token. Relative to data
parallelism, the goals are 0.85 for tensor and 0.8 for pipeline parallelism. The bubble of two ranks and four
micro-batches alone limits a pipeline to 0.8. Ratios are medians over neighboring rounds. CPU time is the sum over both
ranks.

`tp2` uses sequence parallelism, as plain PyTorch does here. `tp2, no sequence parallelism` uses all-reduces instead,
which are cheaper on two ranks of a CPU and save less memory.

Plain PyTorch is a small Llama model. Its `tp2` uses `parallelize_module`, sequence parallelism and `loss_parallel`. Its
`pp2` uses 1F1B of `torch.distributed.pipelining`, with half of the layers on each rank. Its `cp2` uses the ring
attention of `torch.distributed.tensor.experimental` under DDP, because `context_parallel` does not run on a CPU. The
pipelines and the context parallelism of OLMo-core need CUDA.

## Setup

{shapes}
- Two ranks with one thread each on gloo; fp32, fused AdamW, gradient clipping, equal batches. Phalanx and plain PyTorch
  start from equal weights and report equal losses.
- Medians over {rounds} rounds of {steps} steps per trainer, after two warm-up steps.
- torch {version("torch")}, {", ".join(PEERS)}; {platform.machine()}, {os.cpu_count()} cores, Python
  {platform.python_version()}.
- Written by `python -m benchmarks.model_parallel --rounds {rounds}`.
"""


def main() -> None:
    """Measure, print the table and write the page."""
    parser = argparse.ArgumentParser("benchmarks.model_parallel")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["tiny", "small"])
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="steps per trainer and round")
    parser.add_argument("--page", type=Path, default=PAGE, help="file to write")
    args = parser.parse_args()
    peers, data, results = install(), prepare(DataSpec(tokenizer="bytes")).train, []
    for shape in args.shapes:
        for layout in args.layouts:
            results.append(measure(shape, layout, data, peers, args.rounds, args.steps))
            print(table(results[-1:]), flush=True)
    args.page.parent.mkdir(parents=True, exist_ok=True)
    write_results(args.page, page(results, args.rounds, args.steps))


if __name__ == "__main__":
    main()

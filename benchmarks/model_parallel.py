"""A model split over two ranks: tensor, pipeline and context parallelism beside plain PyTorch and OLMo-core.

    python -m benchmarks.model_parallel        # prints the table and writes docs/results/benchmarks/model_parallel.md

Two ranks with one thread each train a shape of `shapes.py` in fp32. Every trainer has its own two processes, and they
take turns: a few steps of one, a few of the next. Data parallelism of the same batch runs among them, as the limit.
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
from benchmarks.peers.install import PEERS, install
from benchmarks.peers.launch import Ranks
from benchmarks.shapes import SHAPES
from phalanx.data.prepare import prepare
from phalanx.spec.run import DataSpec

PLAIN, OLMO = "plain_model", "olmo_core"
LAYOUTS = {
    "tp2": [("tp2, whole tokens", OURS), ("tp2", OURS), ("tp2", PLAIN), ("tp2", OLMO)],
    "pp2": [("pp2", OURS), ("pp2", PLAIN)],
    "cp2": [("cp2", OURS), ("cp2", PLAIN)],
}
"""Who runs: a layout by its name in `shapes.py`, and a trainer; the first is held against the others."""
LIMIT = ("ddp", OURS)
PAGE = Path(__file__).parents[1] / "docs" / "results" / "benchmarks" / "model_parallel.md"

Entry = tuple[str, str]


@dataclass(frozen=True)
class Measured:
    """A layout of one shape: the rounds of each who ran."""

    shape: str
    rounds: dict[Entry, list[Round]]


def measure(shape: str, layout: str, data: str, peers: Path, rounds: int, steps: int) -> Measured:
    """Time who has this layout."""
    with ExitStack() as stack:
        ranks: dict[Entry, Ranks] = {}
        for entry in [*LAYOUTS[layout], LIMIT]:
            name, trainer = entry
            ranks[entry] = Ranks(peers if trainer == OLMO else Path(sys.executable), shape, name, data, [trainer])
            stack.callback(ranks[entry].close)
        by_number = {str(number): Turn(held, entry[1]) for number, (entry, held) in enumerate(ranks.items())}
        taken = in_turn(by_number, rounds, steps)
        return Measured(shape, dict(zip(ranks, taken.values(), strict=True)))


@dataclass(frozen=True)
class Turn:
    """Ranks that are asked by a number for the one trainer they hold."""

    ranks: Ranks
    trainer: str

    def run(self, _: str, steps: int) -> Round:
        return self.ranks.run(self.trainer, steps)


def table(results: Sequence[Measured]) -> str:
    """All of it, in Markdown."""
    lines = [
        "| shape | layout | trainer | tokens/s | of data parallelism | CPU ms per token | memory of a rank, MB "
        "| Phalanx / it: tokens/s | tokens per CPU second |",
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
    """What is written to docs/."""
    shapes = "\n".join(
        f"- `{name}`: {s.layers} layers, width {s.width}, vocabulary {s.vocab:,}; {s.sequences} sequences of "
        f"{s.sequence} tokens per update, {s.micro_batch} in a micro-batch."
        for name, s in SHAPES.items()
        if name in {result.shape for result in results}
    )
    return f"""# A model on two ranks: tensor, pipeline and context parallelism

{table(results)}

Goal: at least 1 beside plain PyTorch and OLMo-core, in wall time and in CPU time per token; of data parallelism 0.85
for tensor and 0.8 for pipeline parallelism (of two ranks and four micro-batches the bubble alone leaves 0.8).
Ratios are medians over neighbouring rounds; CPU time is that of both ranks together.

`tp2` shares the tokens between pairs of products (sequence parallelism), as plain PyTorch does here; `tp2, whole
tokens` does not: with two ranks on a CPU its all-reduce is the cheaper exchange, with less memory saved. Plain
PyTorch is a Llama of a page with `parallelize_module`, sequence parallelism and `loss_parallel`; with
`torch.distributed.pipelining`'s 1F1B and half of the layers on each rank; and with the ring attention of
`torch.distributed.tensor.experimental` (its own `context_parallel` does not run on a CPU) under DDP. OLMo-core's
pipelines and context parallelism need CUDA.

## How

{shapes}
- Two ranks of one thread on gloo; fp32, fused AdamW, gradient clipping; the same batches; Phalanx and plain PyTorch
  start from the same weights and report the same losses.
- {rounds} rounds of {steps} steps of each trainer after two to warm up; medians.
- torch {version("torch")}, {", ".join(PEERS)}; {platform.machine()}, {os.cpu_count()} cores, Python
  {platform.python_version()}.
- Again: `python -m benchmarks.model_parallel --rounds {rounds}`.
"""


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser("benchmarks.model_parallel")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["tiny", "small"])
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="steps of a trainer in a round")
    parser.add_argument("--page", type=Path, default=PAGE, help="where to write")
    asked = parser.parse_args()
    peers, data, results = install(), prepare(DataSpec(tokenizer="bytes")).train, []
    for shape in asked.shapes:
        for layout in asked.layouts:
            results.append(measure(shape, layout, data, peers, asked.rounds, asked.steps))
            print(table(results[-1:]), flush=True)
    asked.page.parent.mkdir(parents=True, exist_ok=True)
    asked.page.write_text(page(results, asked.rounds, asked.steps))


if __name__ == "__main__":
    main()

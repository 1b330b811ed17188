"""Compare the demo's training in emulated fp8 with bf16: loss and held-out bits per byte.

python -m benchmarks.fp8        # trains twice, prints the table and writes docs/results/benchmarks/fp8.md
"""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from benchmarks.pages import write_results
from phalanx.data.loader import prefetch
from phalanx.data.prepare import prepare
from phalanx.spec.files.load import load_run
from phalanx.train.trainer import Trainer
from phalanx.train.training_data import open_training_data

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "examples" / "demo.toml"
PAGE = ROOT / "docs" / "results" / "benchmarks" / "fp8.md"
PRECISIONS = ("bf16", "fp8")
LAST_STEPS = 20
GOAL = 0.01
"""Maximum relative difference of the losses of the two precisions."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """The result of a run."""

    precision: str
    losses: list[float]
    """Loss of each step."""
    held_out_loss: float
    held_out_bits_per_byte: float

    @property
    def last_loss(self) -> float:
        """Mean loss of the last steps."""
        return mean(self.losses[-LAST_STEPS:])


def train(precision: str, steps: int, tokens_per_step: int) -> Row:
    """Train the demo's model on one process.

    Args:
        precision: Precision of the run.
        steps: Number of steps.
        tokens_per_step: Tokens of a step.
    """
    with tempfile.TemporaryDirectory(prefix="phalanx-fp8-") as out:
        run = load_run(
            DEMO,
            [
                f"output_dir={out}",
                f"training.precision={precision}",
                "training.seconds=",
                f"training.steps={steps}",
                f"training.tokens_per_step={tokens_per_step}",
                "layout.micro_batch_size=4",
                "evaluation.tokens=65536",
            ],
        )
        start = time.perf_counter()
        trainer = Trainer(run, open_training_data(run, prepare(run.data)), Path(out), torch.device("cpu"))
        batches = prefetch(trainer.loader, 0, steps)
        losses = []
        for step in range(steps):
            losses.append(trainer.train_step(batches)["loss"])
            if step % 10 == 9:
                print(precision, step + 1, f"{losses[-1]:.4f}", f"{time.perf_counter() - start:.0f} s", flush=True)
        evaluation: dict[str, Any] = dict(trainer.evaluate())
    return Row(
        precision=precision,
        losses=losses,
        held_out_loss=evaluation["held_out_loss"],
        held_out_bits_per_byte=evaluation["held_out_bits_per_byte"],
    )


def page(bf16: Row, fp8: Row, tokens_per_step: int) -> str:
    """Return the page of the benchmark."""
    steps = len(bf16.losses)
    rows = "\n".join(
        f"| {row.precision} | {row.last_loss:.4f} | {row.held_out_loss:.4f} | {row.held_out_bits_per_byte:.4f} |"
        for row in (bf16, fp8)
    )
    difference = fp8.last_loss / bf16.last_loss - 1
    held_out = fp8.held_out_loss / bf16.held_out_loss - 1
    passed = "reached" if max(abs(difference), abs(held_out)) <= GOAL else "missed"
    return f"""# Training in fp8, emulated

| precision | loss, last {LAST_STEPS} steps | held-out loss | held-out bits per byte |
|---|---:|---:|---:|
{rows}

- Goal: losses in fp8 within {GOAL:.0%} of those in bf16. They differ by {difference:+.2%} in training and
  {held_out:+.2%} on held-out text: {passed}.
- The run is the demo's model (`examples/demo.toml`): {steps} steps of {tokens_per_step:,} tokens in one process, from
  the same weights and text.
- A CPU emulates fp8: operands have the rounding of float8, and their products are computed in bf16.
- Machine: {platform.machine()}, {os.cpu_count()} cores, torch {version("torch")}, one thread.
- Written by `python -m benchmarks.fp8`.
"""


def main() -> None:
    """Train in both precisions, print the page and write it."""
    parser = argparse.ArgumentParser("benchmarks.fp8")
    parser.add_argument("--steps", type=int, default=200, help="steps of both runs")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of a step")
    options = parser.parse_args()
    torch.set_num_threads(1)
    bf16, fp8 = (train(precision, options.steps, options.tokens) for precision in PRECISIONS)
    text = page(bf16, fp8, options.tokens)
    print(text)
    write_results(PAGE, text)


if __name__ == "__main__":
    main()

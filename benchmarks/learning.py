"""Compare the demo with an n-gram model: held-out bits per byte and training time.

python -m benchmarks.learning        # runs the demo, prints the table and writes docs/results/benchmarks/learning.md
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from benchmarks.ngram import witten_bell
from benchmarks.pages import write_results
from phalanx.cost.exact.parameters import count_parameters
from phalanx.data.sources import documents, is_held_out
from phalanx.runs.create import read_run_directory
from phalanx.runs.metrics import MetricsRecord, read_metrics
from phalanx.spec.files.load import load_run
from phalanx.spec.run import RunSpec

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "examples" / "demo.toml"
CONTEXTS = (3, 5)
GOALS = {"bf16": 1.62, "fp32": 1.918}
"""Maximum bits per byte with AVX-512, where bf16 is faster, and without: those of the n-gram model with five bytes."""
PAGE = ROOT / "docs" / "results" / "benchmarks" / "learning.md"


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    model: str
    bits_per_byte: float
    seconds: float
    """Wall-clock time from the text to the result; for the demo, from tokens to the result."""


def read_split(run: RunSpec) -> tuple[list[bytes], list[bytes]]:
    """Return the training texts and the held-out texts of a run."""
    train: list[bytes] = []
    held_out: list[bytes] = []
    for document in documents(run.data.train, run.data.text_key):
        side = held_out if is_held_out(document.name, run.data.held_out_fraction) else train
        side.append(document.text.encode())
    return train, held_out


def count(train: list[bytes], held_out: list[bytes], context: int) -> Row:
    """Measure the n-gram model."""
    start = time.perf_counter()
    bits = witten_bell(train, held_out, context)
    return Row(f"Witten-Bell, {context} bytes of context", bits, time.perf_counter() - start)


def train(run: RunSpec, nproc: int) -> tuple[Row, RunSpec, list[MetricsRecord]]:
    """Train the demo; return its row, the run with its number of steps, and its metrics."""
    with tempfile.TemporaryDirectory(prefix="phalanx-learning-") as out:
        start = time.perf_counter()
        command = [
            sys.executable,
            "-m",
            "phalanx",
            "train",
            str(DEMO),
            "--nproc",
            str(nproc),
            "--set",
            f"output_dir={out}",
        ]
        subprocess.run(command, check=True)
        seconds = time.perf_counter() - start
        run, metrics = read_run_directory(Path(out) / run.name)[0], read_metrics(Path(out) / run.name)
    bits = [record["held_out_bits_per_byte"] for record in metrics if "held_out_bits_per_byte" in record]
    row = Row(f"the demo, {count_parameters(run.model).total / 1e6:.1f} M parameters", bits[-1], seconds)
    return row, run, metrics


def table(rows: Sequence[Row]) -> str:
    """Format the rows as a Markdown table."""
    lines = ["| model | bits per byte | seconds |", "|---|---:|---:|"]
    lines += [f"| {row.model} | {row.bits_per_byte:.4f} | {row.seconds:.0f} |" for row in rows]
    return "\n".join(lines)


def page(
    rows: Sequence[Row], run: RunSpec, metrics: Sequence[MetricsRecord], sizes: tuple[int, int], nproc: int
) -> str:
    """Return the page of the benchmark."""
    steps = [record["step_seconds"] for record in metrics if "step_seconds" in record]
    return f"""# Learning: held-out bits per byte of the demo

{table(rows)}

- Goal: at most {GOALS["bf16"]} bits per byte with AVX-512, and less than {GOALS["fp32"]} without. On this machine, the
  demo selected {run.training.precision}.
- The text of every row is the source of the Python {platform.python_version()} library. It has
  {sizes[0] / 1e6:.1f} MB for training and {sizes[1] / 1e6:.2f} MB held out by file.
- The n-gram model (`benchmarks/ngram.py`) counts the complete training text on one thread. A start symbol before each
  file is part of the context. The model predicts every held-out byte.
- The demo (`examples/demo.toml`) trains {len(steps)} steps of {run.training.tokens_per_step:,} tokens in
  {sum(steps):.0f} s on {nproc} ranks. The seconds of its row include start, evaluation and sample.
  The bits per byte are over the bytes of all held-out tokens except the first, and include the ends of documents.
- Machine: {platform.machine()}, {os.cpu_count()} cores, torch {version("torch")}.
- Written by `python -m benchmarks.learning`.
"""


def main() -> None:
    """Measure, print the table and write the page."""
    parser = argparse.ArgumentParser("benchmarks.learning")
    parser.add_argument("--nproc", type=int, default=2, help="ranks of the demo")
    nproc = parser.parse_args().nproc
    run = load_run(DEMO)
    texts = read_split(run)
    rows = [count(*texts, context) for context in CONTEXTS]
    demo, run, metrics = train(run, nproc)
    rows.append(demo)
    print(table(rows))
    sizes = (sum(map(len, texts[0])), sum(map(len, texts[1])))
    write_results(PAGE, page(rows, run, metrics, sizes, nproc))


if __name__ == "__main__":
    main()

"""Compare the speed of reading eight mixed sources on one core with that of one source.

    python -m benchmarks.mixture_reading     # prints the table and writes docs/results/benchmarks/mixture_reading.md

The text is the source of the Python library as byte tokens, a document per file. Eight sources are eight parts of these
documents, with the weights 1 to 8; one source is all of them.
"""

from __future__ import annotations

import os
import platform
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.loader import ROUNDS, SEQUENCES, TOKENS_PER_ROUND, cpu_seconds
from benchmarks.pages import write_results
from phalanx.data.indexed_dataset import IndexedDataset, IndexedWriter
from phalanx.data.loader import StepLoader, TokenLoader
from phalanx.data.mixture_loader import MixtureLoader
from phalanx.data.prepare import prepare
from phalanx.spec.mixture import SourceSpec
from phalanx.spec.run import DataSpec

NUM_SOURCES = 8
TOKENS_PER_STEP = (16_384, 131_072, 524_288)
PAGE = Path(__file__).parents[1] / "docs" / "results" / "benchmarks" / "mixture_reading.md"


@dataclass(frozen=True)
class Row:
    """Row of the table; speeds are in tokens per CPU second."""

    sequence: int
    rows: int
    one: float
    mixed: float


def split_documents(dataset: IndexedDataset, folder: Path) -> list[IndexedDataset]:
    """Write every eighth document to a pair of its own, from the first, the second and so on."""
    parts = []
    for source in range(NUM_SOURCES):
        with IndexedWriter(folder / f"part{source}", dataset.tokens.dtype) as writer:
            for document in range(source, len(dataset), NUM_SOURCES):
                writer.add(dataset.document(document))
        parts.append(IndexedDataset(folder / f"part{source}"))
    return parts


def measure(dataset: IndexedDataset, parts: list[IndexedDataset], sequence: int, tokens_per_step: int) -> Row:
    """Measure the median speeds of both loaders in alternating rounds."""
    rows = tokens_per_step // sequence
    specs = [SourceSpec(name=f"part{n}", path=["-"], weight=n + 1) for n in range(len(parts))]
    mixed = MixtureLoader([TokenLoader(part, sequence, 1, seed=0) for part in parts], specs, rows)
    loaders: tuple[StepLoader, StepLoader] = (TokenLoader(dataset, sequence, rows, seed=0), mixed)
    steps = max(1, TOKENS_PER_ROUND // tokens_per_step)
    for loader in loaders:
        loader.step(0)  # shuffles the epoch
    rounds = [[cpu_seconds(loader.step, steps) for loader in loaders] for _ in range(ROUNDS)]
    one_seconds, mixed_seconds = (statistics.median(times) for times in zip(*rounds, strict=True))
    tokens = steps * rows * sequence
    return Row(sequence, rows, tokens / one_seconds, tokens / mixed_seconds)


def table(rows: list[Row]) -> str:
    """Format the rows as a Markdown table."""
    lines = [
        "| T | rows | tokens per step | one source, M tokens/s | eight sources, M tokens/s | share |",
        "|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        lines.append(
            f"| {row.sequence:,} | {row.rows:,} | {row.sequence * row.rows:,} | {row.one / 1e6:.0f} "
            f"| {row.mixed / 1e6:.0f} | {row.mixed / row.one:.2f} |"
        )
    return "\n".join(lines)


def page(rows: list[Row]) -> str:
    """Return the page of the benchmark."""
    return f"""# Mixtures: tokens per second of eight sources on one core

{table(rows)}

- A step of a mixture finds the source of each row, and reads the rows of each source. That is a fixed cost per step and
  source, which small steps show most.
- Speeds are per CPU second of one thread: medians over {ROUNDS} rounds of {TOKENS_PER_ROUND / 1e6:.0f} M tokens.
  Rounds of one source and of eight alternate.
- The text is the source of the Python library as bytes, a document per file. The eight sources are parts of these
  documents, with the weights 1 to 8.
- Machine: {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, numpy {np.__version__}.
- Written by `python -m benchmarks.mixture_reading`.
"""


def main() -> None:
    """Measure, print the table and write the page."""
    dataset = IndexedDataset(prepare(DataSpec(tokenizer="bytes")).train)
    with tempfile.TemporaryDirectory() as folder:
        parts = split_documents(dataset, Path(folder))
        rows = [measure(dataset, parts, sequence, tokens) for sequence in SEQUENCES for tokens in TOKENS_PER_STEP]
    print(table(rows))
    write_results(PAGE, page(rows))


if __name__ == "__main__":
    main()

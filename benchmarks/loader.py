"""Compare the speed of the loader on one core with the minimum work of any loader.

    python -m benchmarks.loader        # prints the table and writes docs/results/benchmarks/loader.md

The text is the source of the Python library as byte tokens, in its own documents and in documents of 200 tokens. The
limit copies the same number of tokens in file order from the same file into two int64 arrays.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.pages import write_results
from phalanx.data.indexed_dataset import IndexedDataset, IndexedWriter
from phalanx.data.loader import TokenLoader
from phalanx.data.prepare import prepare
from phalanx.spec.run import DataSpec

GOAL = 20e6
"""Tokens per second and core, more than the ranks of a node consume per core."""
SEQUENCES = (256, 1024, 2048)
TOKENS_PER_STEP = (16_384, 131_072)
TOKENS_PER_ROUND = 4_000_000
ROUNDS = 7
SHORT_DOCUMENT = 200
PAGE = Path(__file__).parents[1] / "docs" / "results" / "benchmarks" / "loader.md"


@dataclass(frozen=True)
class Row:
    """Row of the table; speeds are in tokens per CPU second."""

    documents: str
    sequence: int
    rows: int
    loader: float
    limit: float


def measure(dataset: IndexedDataset, name: str, sequence: int, rows: int, tokens: int = TOKENS_PER_ROUND) -> Row:
    """Measure the median speeds of the loader and of the limit in alternating rounds."""
    loader = TokenLoader(dataset, sequence, rows, seed=0)
    steps = max(1, tokens // (rows * sequence))
    size = rows * sequence
    begins = np.linspace(0, dataset.size - size - 1, steps, dtype=np.int64)

    def limit(step: int) -> None:
        dataset.tokens[begins[step] : begins[step] + size].astype(np.int64)
        dataset.tokens[begins[step] + 1 : begins[step] + size + 1].astype(np.int64)

    loader.step(0)  # shuffles the epoch
    rounds = [(cpu_seconds(loader.step, steps), cpu_seconds(limit, steps)) for _ in range(ROUNDS)]
    ours, least = (statistics.median(times) for times in zip(*rounds, strict=True))
    return Row(name, sequence, rows, steps * size / ours, steps * size / least)


def cpu_seconds(work: Callable[[int], object], steps: int) -> float:
    """Return the CPU time of a number of steps."""
    # CPU time, because other programs may use the machine, and the loader does not wait.
    start = time.process_time()
    for step in range(steps):
        work(step)
    return time.process_time() - start


def table(rows: list[Row]) -> str:
    """Format the rows as a Markdown table."""
    lines = [
        "| documents | T | rows | loader, M tokens/s | limit (copy), M tokens/s | share of limit "
        "| multiple of the goal (20 M) |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        lines.append(
            f"| {row.documents} | {row.sequence:,} | {row.rows:,} | {row.loader / 1e6:.0f} | {row.limit / 1e6:.0f} "
            f"| {row.loader / row.limit:.0%} | {row.loader / GOAL:.1f} x |"
        )
    return "\n".join(lines)


def page(rows: list[Row]) -> str:
    """Return the page of the benchmark."""
    return f"""# Loader: tokens per second on one core

{table(rows)}

- A batch contains the token, the target and the document start of each position. Tokens come from a memory-mapped
  uint16 file in the page cache.
- Speeds are per CPU second of one thread: medians over {ROUNDS} rounds of {TOKENS_PER_ROUND / 1e6:.0f} M tokens. Rounds
  of the loader and of the limit alternate.
- The limit copies the same number of tokens in file order from the same file into two int64 arrays. The loader also
  looks up the documents of each row, gathers tokens from the complete file and marks document starts.
- The text is the source of the Python library as bytes. "files" has one document per file, and "short" has documents of
  {SHORT_DOCUMENT} tokens.
- Machine: {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, numpy {np.__version__}.
- Written by `python -m benchmarks.loader`.
"""


def short_documents(dataset: IndexedDataset, prefix: Path) -> IndexedDataset:
    """Write the same tokens in documents of SHORT_DOCUMENT tokens."""
    with IndexedWriter(prefix, dataset.tokens.dtype) as writer:
        for begin in range(0, dataset.size, SHORT_DOCUMENT):
            writer.add(dataset.tokens[begin : begin + SHORT_DOCUMENT])
    return IndexedDataset(prefix)


def main() -> None:
    """Measure, print the table and write the page."""
    prepared = prepare(DataSpec(tokenizer="bytes"))
    files = IndexedDataset(prepared.train)
    short = short_documents(files, Path(prepared.train).with_name("benchmark_short"))
    rows = [
        measure(dataset, name, sequence, tokens // sequence)
        for name, dataset in (("files", files), ("short", short))
        for sequence in SEQUENCES
        for tokens in TOKENS_PER_STEP
    ]
    print(table(rows))
    write_results(PAGE, page(rows))


if __name__ == "__main__":
    main()

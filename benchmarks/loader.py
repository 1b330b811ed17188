"""How fast the loader makes batches on one core, beside the least that any loader has to do.

    python -m benchmarks.loader        # prints the table and writes docs/results/benchmarks/loader.md

The text is the Python library as byte tokens, in its own documents and in documents of about 200 tokens. The
limit is a copy of as many tokens, already in order, from the same file into the same two int64 arrays.
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

from phalanx.data.indexed_dataset import IndexedDataset, IndexedWriter
from phalanx.data.loader import TokenLoader
from phalanx.data.prepare import prepare
from phalanx.spec.run import DataSpec

GOAL = 20e6
"""Tokens per second and core: more than the ranks of a node take from a core."""
SEQUENCES = (256, 1024, 2048)
TOKENS_PER_STEP = (16_384, 131_072)
TOKENS_PER_ROUND = 4_000_000
ROUNDS = 7
SHORT_DOCUMENT = 200
PAGE = Path(__file__).parents[1] / "docs" / "results" / "benchmarks" / "loader.md"


@dataclass(frozen=True)
class Row:
    """One line of the table; speeds in tokens per CPU second."""

    documents: str
    sequence: int
    rows: int
    loader: float
    limit: float


def measure(dataset: IndexedDataset, name: str, sequence: int, rows: int, tokens: int = TOKENS_PER_ROUND) -> Row:
    """The median speeds of the loader and of the limit, their rounds taken in turn."""
    loader = TokenLoader(dataset, sequence, rows, seed=0)
    steps = max(1, tokens // (rows * sequence))
    size = rows * sequence
    begins = np.linspace(0, dataset.size - size - 1, steps, dtype=np.int64)

    def limit(step: int) -> None:
        dataset.tokens[begins[step] : begins[step] + size].astype(np.int64)
        dataset.tokens[begins[step] + 1 : begins[step] + size + 1].astype(np.int64)

    loader.step(0)  # shuffles the epoch
    rounds = [(_seconds(loader.step, steps), _seconds(limit, steps)) for _ in range(ROUNDS)]
    ours, least = (statistics.median(times) for times in zip(*rounds, strict=True))
    return Row(name, sequence, rows, steps * size / ours, steps * size / least)


def _seconds(work: Callable[[int], object], steps: int) -> float:
    # CPU time, because others may share the machine; none of this waits for anything.
    begun = time.process_time()
    for step in range(steps):
        work(step)
    return time.process_time() - begun


def table(rows: list[Row]) -> str:
    """The rows in Markdown."""
    lines = [
        "| documents | T | rows | loader, M tokens/s | limit (copy), M tokens/s | share of limit | goal of 20 M |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        lines.append(
            f"| {row.documents} | {row.sequence:,} | {row.rows:,} | {row.loader / 1e6:.0f} | {row.limit / 1e6:.0f} "
            f"| {row.loader / row.limit:.0%} | {row.loader / GOAL:.1f} x |"
        )
    return "\n".join(lines)


def page(rows: list[Row]) -> str:
    """What is written to docs/."""
    return f"""# Loader: tokens per second on one core

{table(rows)}

- A batch is tokens, targets and the document start of each position, from a memory-mapped uint16 file in the page
  cache.
- Speeds are per CPU second of one thread: the median of {ROUNDS} rounds of {TOKENS_PER_ROUND / 1e6:.0f} M tokens, the
  loader's and the limit's in turn.
- The limit copies as many tokens, already in order, from the same file into the same two int64 arrays. The loader also
  looks up the documents of each row, gathers from all over the file, and marks where documents start.
- Text: the Python library as bytes, in its own documents ("files") and in documents of {SHORT_DOCUMENT} tokens
  ("short").
- Machine: {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, numpy {np.__version__}.
- Again: `python -m benchmarks.loader`.
"""


def short_documents(dataset: IndexedDataset, prefix: Path) -> IndexedDataset:
    """The same tokens in documents of SHORT_DOCUMENT tokens."""
    with IndexedWriter(prefix, dataset.tokens.dtype) as writer:
        for begin in range(0, dataset.size, SHORT_DOCUMENT):
            writer.add(dataset.tokens[begin : begin + SHORT_DOCUMENT])
    return IndexedDataset(prefix)


def main() -> None:
    """Measure, print, write."""
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
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(page(rows))


if __name__ == "__main__":
    main()

"""What can only be seen on a GPU, in parts of at most eight minutes on one card.

    python -m benchmarks.gpu --part attention    # each kernel's error against fp64, and its time
    python -m benchmarks.gpu --part parity       # layouts on NCCL, up to four ranks on one GPU, against one CPU process
    python -m benchmarks.gpu --part speed        # a training step beside a plain PyTorch loop
    python -m benchmarks.gpu --part runs         # whole runs: predicted memory, checkpoint, kill, resume, profile

Each part prints one table, and writes it to docs/benchmarks/gpu-PART.md.
"""

from __future__ import annotations

import argparse
import importlib
import os
from pathlib import Path
from typing import Protocol, cast

import torch

PARTS = ("attention", "parity", "speed", "runs")
DOCS = Path(__file__).parents[2] / "docs" / "benchmarks"


class Part(Protocol):
    """A module of this package."""

    TITLE: str

    def measure(self) -> str:
        """Measure; returns a page's text below its title, in Markdown."""


def main() -> None:
    """Run the parts that are asked for, one after the other."""
    parser = argparse.ArgumentParser("benchmarks.gpu")
    parser.add_argument("--part", choices=PARTS, nargs="+", default=PARTS)
    parser.add_argument("--out", type=Path, default=DOCS, help="the folder to write to (docs/benchmarks)")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    for name in asked.part:
        part = cast(Part, importlib.import_module(f"benchmarks.gpu.{name}"))
        page = f"# {part.TITLE}\n\n{part.measure()}\n\n{machine()} Again: `python -m benchmarks.gpu --part {name}`.\n"
        print(page, flush=True)
        (asked.out / f"gpu-{name}.md").write_text(page)


def machine() -> str:
    """What this was measured on."""
    card = torch.cuda.get_device_properties(0)
    return (
        f"One {card.name}, {card.total_memory / 2**30:.0f} GiB, {os.cpu_count()} CPU cores; torch {torch.__version__}, "
        f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}."  # type: ignore[attr-defined]
    )


if __name__ == "__main__":
    main()

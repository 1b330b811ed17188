"""Run the benchmarks that need a GPU, in parts of at most eight minutes on one GPU.

Each part prints one table, and writes it to docs/results/benchmarks/gpu-PART.md. On a null GPU, which computes nothing
(tests/null_gpu), every part runs with small sizes, compares no numbers and writes no page.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from pathlib import Path
from typing import Protocol, cast

from benchmarks.pages import write_results

PARTS = {
    "kernels": "each kernel of a step, compared with fp64 on the CPU",
    "attention": "errors and times of attention kernels",
    "parity": "layouts on NCCL with up to four ranks on one GPU, compared with one CPU process",
    "speed": "a training step, compared with a plain PyTorch loop and torchtitan",
    "rank0": "rank 0 of 8 of llama3-8b without a network: MFU ceiling, measured and predicted memory",
    "host": "waits, kernel launches and compilations of the host, and idle time of the GPU",
    "plan": "bench, calibrate and plan from the command line: measured and planned memory and time",
    "runs": "complete runs from the command line",
    "state": "checkpoints, kill, hang and out of memory from the command line",
    "fp8": "matrix products in fp8, compared with bf16",
}
"""Modules of this package with descriptions."""
DOCS = Path(__file__).parents[2] / "docs" / "results" / "benchmarks"


class Part(Protocol):
    """Module of this package."""

    TITLE: str
    COLUMNS: tuple[str, ...]
    NOTES: str
    """Explanations of the table, in Markdown."""

    def measure(self, table: object) -> None:
        """Measure, and add rows to the table."""


def main() -> int:
    """Run the selected parts, one after the other; return the exit code."""
    parts = "\n".join(f"  {name:10} {description}" for name, description in PARTS.items())
    parser = argparse.ArgumentParser(
        "benchmarks.gpu", description=f"{__doc__}\nparts:\n{parts}", formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--part", choices=PARTS, nargs="+", default=list(PARTS), help="parts to run (default: all)")
    parser.add_argument("--out", type=Path, default=DOCS, help="folder of the pages (default: docs/results/benchmarks)")
    arguments = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]  # one card

    import torch

    if not torch.cuda.is_available():
        print("benchmarks.gpu: PyTorch finds no GPU on this machine. Run it on a machine with one.", file=sys.stderr)
        return 2
    failures = [f"{name}: {row}" for name in arguments.part for row in run_part(name, arguments.out)]
    print("\n".join([f"{len(failures)} rows failed", *failures]), flush=True)
    return 1 if failures else 0


def run_part(name: str, folder: Path) -> list[str]:
    """Measure a part, print its page and write it; return the names of the rows that failed."""
    from benchmarks.gpu.harness import IS_DRY, Table

    part, started_at = cast(Part, importlib.import_module(f"benchmarks.gpu.{name}")), time.monotonic()
    print(f"# {part.TITLE}", flush=True)
    table = Table(part.COLUMNS)
    try:
        part.measure(table)
    except Exception as error:  # keeps the measured rows, and continues with the next part
        table.add("complete part", f"**{type(error).__name__}**: {error}")
        table.failures.append("complete part")
    took = f"{machine()} Written by `python -m benchmarks.gpu --part {name}` in {time.monotonic() - started_at:.0f} s."
    page = "\n\n".join([f"# {part.TITLE}", "\n".join(table.lines), part.NOTES.strip(), took]) + "\n"
    print(page, flush=True)
    if not IS_DRY:
        write_results(folder / f"gpu-{name}.md", page)
    return table.failures


def machine() -> str:
    """Describe the GPU, the CPU cores and the versions."""
    import torch

    card = torch.cuda.get_device_properties(0)
    return (
        f"One {card.name}, {card.total_memory / 2**30:.0f} GiB, {os.cpu_count()} CPU cores; torch {torch.__version__}, "
        f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}."  # type: ignore[attr-defined]
    )


if __name__ == "__main__":
    sys.exit(main())

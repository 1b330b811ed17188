"""Trace runs that are too large for this machine, and compare them with the plan.

    python -m benchmarks.dryrun                    # prints the table and writes docs/results/benchmarks/dryrun.md
    python -m benchmarks.dryrun qwen3-30b-a3b      # one model, printed only

The planner selects the layout of each run. The first and last ranks of every axis are traced, two at a time.
"""

from __future__ import annotations

import platform
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from phalanx.plan.search.explain import plan_or_raise
from phalanx.spec.files.load import run_from_table
from phalanx.spec.run import RunSpec
from phalanx.verify.dry_run import corner_ranks, trace_ranks
from phalanx.verify.plan_comparison import PlanCheck, compare_with_plan

SEQUENCE = 8192
NPROC = 8
RUNS = {"llama3-70b": (1024, 2**23), "llama3-405b": (16_384, 2**24), "qwen3-30b-a3b": (16_384, 2**27)}
"""World size, and tokens per optimizer update."""
PAGE = Path(__file__).parents[1] / "docs" / "results" / "benchmarks" / "dryrun.md"
HEADER = (
    "| model | ranks | layout | rank | collectives | calls equal | bytes equal | state equal "
    "| peak memory, traced / planned | FLOPs, traced / planned | seconds | process memory |\n"
    "|---|---:|---|---:|---:|---|---|---|---:|---:|---:|---:|"
)


@dataclass(frozen=True)
class Row:
    """One traced rank."""

    model: str
    world_size: int
    layout: str
    rank: int
    lines: list[PlanCheck]
    seconds: float
    process_bytes: int

    def __str__(self) -> str:
        collectives = [line for line in self.lines if line.kind == "collective"]
        calls = sum(line.traced_calls for line in collectives)
        calls_equal = all(line.traced_calls == line.planned_calls for line in collectives)
        bytes_equal = all(abs(line.traced - line.planned) <= 1e-9 * line.planned for line in collectives)
        state = all(line.agrees for line in self.lines if line.kind == "memory" and line.what != "total")
        total, flops = (next(line for line in self.lines if line.what == what) for what in ("total", "step"))
        words = [
            self.model,
            f"{self.world_size:,}",
            self.layout,
            f"{self.rank:,}",
            f"{calls:,}",
            *("yes" if equal else "no" for equal in (calls_equal, bytes_equal, state)),
            f"{total.traced / 1e9:.2f} / {total.planned / 1e9:.2f} GB ({total.traced / total.planned - 1:+.1%})",
            f"{flops.traced / flops.planned:.4f}",
            f"{self.seconds:.0f}",
            f"{self.process_bytes / 1e9:.2f} GB",
        ]
        return f"| {' | '.join(words)} |"


def described(model: str) -> tuple[RunSpec, str]:
    """Return the run with the layout that the planner selects, and a description of the layout."""
    world_size, tokens = RUNS[model]
    run = run_from_table(
        {
            "model": {"preset": model},
            "training": {"seq_len": SEQUENCE, "tokens_per_step": tokens},
            "cluster": {"preset": "h100", "nodes": world_size // NPROC, "nproc_per_node": NPROC},
        }
    )
    taken = plan_or_raise(run, world_size).best.candidate
    return run.model_copy(update={"layout": taken.layout()}), str(taken)


def traced(model: str) -> list[Row]:
    """Trace the corner ranks of a run."""
    run, layout = described(model)
    world_size, rows = RUNS[model][0], []
    for rank in trace_ranks(run, world_size, corner_ranks(run, world_size)):
        took = rank["tracing"]
        lines = compare_with_plan(run, world_size, rank)
        rows.append(Row(model, world_size, layout, rank["rank"], lines, took["seconds"], took["process_bytes"]))
        print(rows[-1], flush=True)
    return rows


def main(models: list[str]) -> None:
    """Trace the runs and write the page."""
    print(HEADER)
    begun, rows = time.perf_counter(), [row for model in models or RUNS for row in traced(model)]
    took = time.perf_counter() - begun
    if models:
        return
    notes = [
        '- "Traced" values come from the program, which runs on tensors without data. "Planned" values are predictions '
        "of `phalanx plan`, which does not use the trace.",
        f"- Sequences have {SEQUENCE:,} tokens, and nodes have 8 H100. Tokens per update: "
        f"{', '.join(f'{name} {tokens:,}' for name, (_, tokens) in RUNS.items())}.",
        "- Documents are masked, which is the default. Experts are balanced.",
        f"- Two ranks were traced at a time, in {took / 60:.0f} minutes. Machine: {platform.machine()}, 2 cores, "
        f"Python {platform.python_version()}, torch {torch.__version__}.",
        "- Written by `python -m benchmarks.dryrun`.",
    ]
    title = "# Dry runs at full size compared with the plan"
    PAGE.write_text("\n".join([title, "", HEADER, *map(str, rows), "", *notes, ""]))


if __name__ == "__main__":
    main(sys.argv[1:])

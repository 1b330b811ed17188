"""Trace runs that are too large for this machine, and compare them with the plan.

    python -m benchmarks.dryrun                    # prints the tables and writes docs/results/benchmarks/dryrun.md
    python -m benchmarks.dryrun qwen3-30b-a3b      # one model, printed only

The planner selects the layout of each run. Of three large runs the first and last ranks of every axis are traced, of
the first three choices for each preset on eight nodes of each machine the first rank, and with pipelines the last.
"""

from __future__ import annotations

import platform
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.pages import write_results
from phalanx.plan.search.explain import plan_or_raise
from phalanx.spec.errors import UserError
from phalanx.spec.files.load import run_from_table
from phalanx.spec.resolved_run import ResolvedRun
from phalanx.spec.run import RunSpec
from phalanx.verify.dry_run import corner_ranks, trace_ranks
from phalanx.verify.plan_comparison import PlanCheck, compare_with_plan

SEQUENCE = 8192
NPROC = 8
RUNS = {"llama3-70b": (1024, 2**23), "llama3-405b": (16_384, 2**24), "qwen3-30b-a3b": (16_384, 2**27)}
"""World size, and tokens per optimizer update."""
PRESETS = ("llama3-8b", "llama3-70b", "llama3-405b", "mixtral-8x7b", "qwen3-30b-a3b")
MACHINES = ("h100", "b200", "mi300x", "rtx4090")
NUM_NODES = 8
NUM_CHOICES = 3
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
        state = all(line.agrees for line in self.lines if line.kind == "memory" and line.quantity != "total")
        total, flops = (
            next(line for line in self.lines if line.quantity == quantity) for quantity in ("total", "step")
        )
        cells = [
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
        return f"| {' | '.join(cells)} |"


def plan_layouts(model: str, machine: str, nodes: int, tokens: int, choices: int) -> list[tuple[RunSpec, str]]:
    """Return the run with each of the planner's first choices of a layout, and descriptions of them."""
    run = run_from_table(
        {
            "model": {"preset": model},
            "training": {"seq_len": SEQUENCE, "tokens_per_step": tokens},
            "cluster": {"preset": machine, "nodes": nodes, "nproc_per_node": NPROC},
        }
    )
    layouts = plan_or_raise(ResolvedRun(run, nodes * NPROC)).layouts[:choices]
    return [
        (run.model_copy(update={"layout": choice.candidate.layout()}), f"{machine}: {choice.candidate}")
        for choice in layouts
    ]


def trace(run: RunSpec, model: str, layout: str, world_size: int, ranks: list[int]) -> list[Row]:
    """Trace these ranks of a run."""
    rows = []
    for rank in trace_ranks(ResolvedRun(run, world_size), ranks, max_workers=1):
        tracing = rank["tracing"]
        lines = compare_with_plan(ResolvedRun(run, world_size), rank)
        rows.append(Row(model, world_size, layout, rank["rank"], lines, tracing["seconds"], tracing["process_bytes"]))
        print(rows[-1], flush=True)
    return rows


def trace_large_run(model: str) -> list[Row]:
    """Trace the corner ranks of a large run with the planner's best layout."""
    world_size, tokens = RUNS[model]
    ((run, layout),) = plan_layouts(model, "h100", world_size // NPROC, tokens, choices=1)
    return trace(run, model, layout, world_size, corner_ranks(ResolvedRun(run, world_size)))


def trace_choices(model: str, machine: str) -> list[Row]:
    """Trace the first and the last rank of the planner's first choices; a model that does not fit has no rows."""
    world_size = NUM_NODES * NPROC
    try:
        choices = plan_layouts(model, machine, NUM_NODES, tokens=SEQUENCE * world_size * 4, choices=NUM_CHOICES)
    except UserError as error:
        print(f"{model} on {machine}: {error.problem}", flush=True)
        return []
    return [
        row
        for run, layout in choices
        for row in trace(run, model, layout, world_size, [0, world_size - 1] if run.layout.pp > 1 else [0])
    ]


def main(models: list[str]) -> None:
    """Trace the runs and write the page."""
    print(HEADER)
    start = time.perf_counter()
    large = [row for model in models or RUNS if model in RUNS for row in trace_large_run(model)]
    print(HEADER)
    choices = [row for model in models or PRESETS for machine in MACHINES for row in trace_choices(model, machine)]
    seconds = time.perf_counter() - start
    if models:
        return
    agreeing = sum(all(line.agrees for line in row.lines) for row in choices)
    notes = [
        '- "Traced" values come from the program, which runs on tensors without data. "Planned" values are predictions '
        "of `phalanx plan`, which does not use the trace.",
        f"- Sequences have {SEQUENCE:,} tokens, and nodes have 8 GPUs. Tokens per update of the first table: "
        f"{', '.join(f'{name} {tokens:,}' for name, (_, tokens) in RUNS.items())}.",
        "- Documents are masked, which is the default. Experts are balanced. Equal micro-batches ran once.",
        f"- Ranks were traced one at a time, in {seconds / 60:.0f} minutes. Machine: {platform.machine()}, 2 cores, "
        f"Python {platform.python_version()}, torch {torch.__version__}.",
        "- Written by `python -m benchmarks.dryrun`.",
    ]
    text = [
        "# Dry runs at full size compared with the plan",
        "",
        HEADER,
        *map(str, large),
        "",
        f"## The planner's first {NUM_CHOICES} choices on {NUM_NODES} nodes",
        "",
        f"{agreeing} of {len(choices)} ranks agree: collectives and state are equal, the peak is within 2 %, FLOPs are "
        "within 0.1 %.",
        "",
        HEADER,
        *map(str, choices),
        "",
        *notes,
        "",
    ]
    write_results(PAGE, "\n".join(text))


if __name__ == "__main__":
    main(sys.argv[1:])

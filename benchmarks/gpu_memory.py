"""What the plan says that a rank on a GPU allocates and reserves, against PyTorch's own allocator on a null GPU.

    python -m benchmarks.gpu_memory --python PYTHON --null OUT    # measures all rows; writes docs/results/accuracy.md
    python -m benchmarks.gpu_memory                               # the same from the rows that were recorded

A null GPU computes nothing, but PyTorch's CUDA build runs on it: the caching allocator, autograd, FSDP2 and
ProcessGroupNCCL are real, so that bytes are those of a GPU. PYTHON has PyTorch's CUDA build, and OUT/lib the library
that is preloaded (tests/null_gpu). Each row is a rank of a run, in a steady step (`benchmarks.gpu_memory_rank`).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.calibration import ACCURACY, write_section
from benchmarks.gpu_memory_runs import OTHER_RUNS, Row, all_rows, described_run
from phalanx.cost.exact.rank_memory import RankMemory, rank_memory
from phalanx.spec.parallel_dims import parallel_dims

RECORDED = Path(__file__).parents[1] / "tests" / "cost" / "exact" / "cuda_memory.json"
HEADING = "Memory on CUDA"
TEXT = """By `python -m benchmarks.gpu_memory`: what `phalanx memory` says of a rank on H100s, against the most that the
caching allocator of PyTorch 2.11 allocated and reserved in a steady step of the same rank on a GPU that computes
nothing, with expandable segments. bf16, AdamW, micro-batches of one sequence: two, in a pipeline of p stages 4 p.
Sequences of 8,192 tokens, with experts of 4,096. llama3-8b has all its layers; of llama3-70b there are 8, of
qwen3-30b-a3b 16, of mixtral-8x7b 8. Documents are masked where something is computed again. `pp0` is the first rank of
a pipeline, and the other its last. GB are 1e9 bytes.
"""
OTHER_TEXT = """One number was fitted to these rows: the share of the largest tensor that the allocator loses. Rows that
it was not fitted to, with all layers, but for ddp, which has 4:
"""
HEADER = (
    "| model | layout | ranks | allocated, planned | found | off by | reserved, planned | found | off by |\n"
    "|---|---|---:|---:|---:|---:|---:|---:|---:|"
)
LIMITS = {"allocated": 0.03, "reserved": 0.08}


def planned(row: Row) -> RankMemory:
    """What the plan says of the rank."""
    run = described_run(row)
    stage = parallel_dims(run.layout, row.world_size).coordinates(row.rank)["pp"]
    return list(rank_memory(run, row.world_size).values())[stage]


def measure(row: Row, python: str, null: str) -> Row:
    """The row with what a process of this rank allocated and reserved on the null GPU."""
    environment = {
        **os.environ,
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "LD_LIBRARY_PATH": f"{null}/lib",
        "LD_PRELOAD": f"{null}/lib/libnullgpu.so",
        "NULL_GPU_ALONE": "1",  # no other rank comes to a communicator
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    command = [python, "-m", "benchmarks.gpu_memory_rank", json.dumps(asdict(row))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    if done.returncode:
        return replace(row, problem=(done.stderr.strip() or f"exit {done.returncode}").splitlines()[-1][:90])
    return replace(row, **json.loads(done.stdout.splitlines()[-1]))


def recorded_rows() -> list[Row]:
    """The rows of the last measurement."""
    return [Row(**row) for row in json.loads(RECORDED.read_text())]


def table_line(row: Row) -> str:
    """A line of the table."""
    memory, words = planned(row), [row.model, row.layout, str(row.world_size)]
    if row.problem:
        return f"| {' | '.join(words)} | {memory.total / 1e9:.2f} | {row.problem} |"
    pairs = (memory.total, row.allocated), (memory.reserved, row.reserved)
    words += [f"{plan / 1e9:.2f} | {found / 1e9:.2f} | {plan / found - 1:+.1%}" for plan, found in pairs]
    return f"| {' | '.join(words)} |"


def summary(rows: list[Row]) -> Iterator[str]:
    """How far the plan is off, and how many rows miss the target."""
    for name, limit in LIMITS.items():
        plans = [memory.total if name == "allocated" else memory.reserved for memory in map(planned, rows)]
        errors = [abs(plan / getattr(row, name) - 1) for plan, row in zip(plans, rows, strict=True)]
        missed = [f"{row.model} {row.layout}" for row, error in zip(rows, errors, strict=True) if error > limit]
        verdict = f"outside {limit:.0%}: {', '.join(missed) or 'none'}"
        yield f"{name}: median {statistics.median(errors):.1%}, worst {max(errors):.1%}, {verdict}"


def section(rows: list[Row]) -> str:
    """The section of docs/results/accuracy.md."""
    groups = rows[: -len(OTHER_RUNS)], rows[-len(OTHER_RUNS) :]
    lines = []
    for text, group in zip((TEXT, OTHER_TEXT), groups, strict=True):
        lines += [text, HEADER, *map(table_line, group), ""]
        lines += [f"- {line}" for line in summary([row for row in group if not row.problem])] + [""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser("benchmarks.gpu_memory", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--python", help="an interpreter with PyTorch's CUDA build; by default recorded rows are shown")
    parser.add_argument("--null", metavar="OUT", help="the folder of the null GPU")
    parser.add_argument("--only", default="", help="measure rows whose model and layout contain this, and print them")
    arguments = parser.parse_args()
    if arguments.python is None:
        rows = recorded_rows()
    else:
        rows = []
        for row in all_rows():
            if arguments.only in f"{row.model} {row.layout}":
                rows.append(measure(row, arguments.python, arguments.null))
                print(table_line(rows[-1]), flush=True)
        if arguments.only:
            return
        RECORDED.write_text("[\n" + ",\n".join(json.dumps(asdict(row)) for row in rows) + "\n]\n")
    text = section(rows)
    print(text)
    write_section(ACCURACY, HEADING, text)


if __name__ == "__main__":
    main()

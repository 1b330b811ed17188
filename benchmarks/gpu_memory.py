"""What the plan says that a rank on a GPU allocates and reserves, against PyTorch's own allocator on a null GPU.

    python -m benchmarks.gpu_memory --python PYTHON --null OUT    # measures all rows, and writes docs/accuracy.md
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
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.calibration import ACCURACY, write_section
from phalanx.cost.exact.rank_memory import RankMemory, rank_memory
from phalanx.spec.files.load import load_run
from phalanx.spec.parallel_dims import parallel_dims, pipeline_stage_groups
from phalanx.spec.run import RunSpec

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
NONE, SELECTIVE, FULL = (f"activation_checkpointing={kind}" for kind in ("none", "selective", "full"))
DENSE_LAYOUTS = {
    "zero3 none": (8, f"data_parallel=zero3 {NONE}"),
    "zero3 selective": (8, f"data_parallel=zero3 {SELECTIVE}"),
    "zero3 full": (8, f"data_parallel=zero3 {FULL}"),
    "hsdp 8 selective": (32, f"data_parallel=hsdp dp_shard=8 {SELECTIVE}"),
    "hsdp 16 full": (32, f"data_parallel=hsdp dp_shard=16 {FULL}"),
    "tp2 zero3 none": (16, f"data_parallel=zero3 tp=2 {NONE}"),
    "tp4 zero1 full": (32, f"data_parallel=zero1 tp=4 {FULL}"),
    "tp8 zero3 selective": (64, f"data_parallel=zero3 tp=8 {SELECTIVE}"),
    "pp2 1f1b zero1 full": (16, f"data_parallel=zero1 pp=2 {FULL}"),
    "pp4 tp2 zb-v zero1 none": (32, f"data_parallel=zero1 pp=4 tp=2 schedule=zb-v {NONE}"),
    "cp2 ring zero3 none": (16, f"data_parallel=zero3 cp=2 {NONE}"),
    "cp4 ulysses zero3 full": (32, f"data_parallel=zero3 cp=4 cp_method=ulysses {FULL}"),
}
MOE_LAYOUTS = {
    "zero3 full": (64, f"data_parallel=zero3 {FULL}"),
    "zero3 selective": (64, f"data_parallel=zero3 {SELECTIVE}"),
    "ep8 zero3 full": (64, f"data_parallel=zero3 ep=8 {FULL}"),
    "ep8 zero3 selective": (64, f"data_parallel=zero3 ep=8 {SELECTIVE}"),
    "ep4 zero3 none": (64, f"data_parallel=zero3 ep=4 {NONE}"),
    "ep8 zero1 full": (64, f"data_parallel=zero1 ep=8 {FULL}"),
    "ep4 hsdp 16 full": (64, f"data_parallel=hsdp dp_shard=16 ep=4 {FULL}"),
    "tp2 zero3 full": (64, f"data_parallel=zero3 tp=2 {FULL}"),
    "ep8 tp2 zero3 full": (64, f"data_parallel=zero3 ep=8 tp=2 {FULL}"),
    "ep4 pp2 1f1b zero1 full": (64, f"data_parallel=zero1 ep=4 pp=2 {FULL}"),
    "ep8 cp2 ring zero3 full": (64, f"data_parallel=zero3 ep=8 cp=2 {FULL}"),
    "ep4 cp2 ulysses zero3 none": (64, f"data_parallel=zero3 ep=4 cp=2 cp_method=ulysses {NONE}"),
}
FEW_EXPERTS_LAYOUTS = MOE_LAYOUTS | {  # more ranks than experts would pad these to one for each
    name: (ranks, MOE_LAYOUTS[name][1])
    for name, ranks in (("zero3 full", 8), ("zero3 selective", 8), ("tp2 zero3 full", 16))
}
MODELS = {
    "llama3-8b": (32, DENSE_LAYOUTS),
    "llama3-70b": (8, DENSE_LAYOUTS),
    "qwen3-30b-a3b": (16, MOE_LAYOUTS),
    "mixtral-8x7b": (8, FEW_EXPERTS_LAYOUTS),
}
"""Layers, fewer than the model has where all of them do not fit 80 GB in most of the layouts."""
OTHER_RUNS = (
    ("llama3-8b", 32, "zero1 full", 16, f"data_parallel=zero1 {FULL}"),
    ("llama3-8b", 32, "zero2 full", 16, f"data_parallel=zero2 {FULL}"),
    ("llama3-8b", 32, "tp4 zero3 none", 32, f"data_parallel=zero3 tp=4 {NONE}"),
    ("llama3-8b", 32, "cp2 ulysses hsdp 8 none", 32, f"data_parallel=hsdp dp_shard=4 cp=2 cp_method=ulysses {NONE}"),
    ("llama3-8b", 4, "ddp none", 8, f"data_parallel=ddp {NONE}"),
    ("llama3-70b", 80, "tp8 zero3 full", 64, f"data_parallel=zero3 tp=8 {FULL}"),
    ("qwen3-30b-a3b", 48, "zero3 full", 64, f"data_parallel=zero3 {FULL}"),
    ("mixtral-8x7b", 32, "tp8 zero3 full", 64, f"data_parallel=zero3 tp=8 {FULL}"),
)


@dataclass(frozen=True)
class Row:
    """A rank, and the most that it allocated and reserved in a step."""

    model: str
    layout: str
    world_size: int
    rank: int
    settings: list[str]
    """As given to `--set`."""
    allocated: int = 0
    reserved: int = 0
    problem: str = ""


def all_rows() -> Iterator[Row]:
    """Each layout of each model: of a pipeline its first and its last rank."""
    runs = [(model, layers, name, *run) for model, (layers, some) in MODELS.items() for name, run in some.items()]
    for model, layers, name, world_size, words in (*runs, *OTHER_RUNS):
        tokens = 8192 if model.startswith("llama") else 4096
        settings = [f"model.preset={model}", f"model.num_layers={layers}", f"training.seq_len={tokens}"]
        settings += [f"data.mask_documents={str(NONE not in words).lower()}"]
        row = Row(model, name, world_size, 0, settings + [f"layout.{word}" for word in words.split()])
        stages = pipeline_stage_groups(parallel_dims(described_run(row).layout, world_size))
        for stage in sorted({0, len(stages) - 1}):
            place = f" pp{stage}" if len(stages) > 1 else ""
            yield replace(row, rank=stages[stage][0], layout=name + place)


def described_run(row: Row) -> RunSpec:
    """The run of a row on H100s: of each rank two micro-batches of one sequence, in a pipeline four for each stage."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "run.toml"
        file.write_text('name = "gpu-memory"\n[cluster]\npreset = "h100"\n')
        run = load_run(file, row.settings, environment={})
        dims = parallel_dims(run.layout, row.world_size)
        sequences = dims.dp_size * (2 if run.layout.pp == 1 else 4 * run.layout.pp)
        tokens = f"training.tokens_per_step={sequences * run.training.seq_len}"
        return load_run(file, [*row.settings, tokens, "layout.micro_batch_size=1"], environment={})


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
    """The section of docs/accuracy.md."""
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

"""Measure the host in a step on one GPU: waits and their lines, kernel launches, compilations, and GPU idle time.

python -m benchmarks.gpu.host VARIANT     # prints a line of JSON for the GPU of this process
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.utils import counters
from torch.profiler import profile, record_function

from benchmarks.gpu.harness import IS_DRY, Table, real_or_dry, run_json
from phalanx.data.loader import prefetch
from phalanx.data.prepare import prepare
from phalanx.spec.files.load import run_from_table
from phalanx.spec.run import RunSpec
from phalanx.train.trainer import Trainer
from phalanx.train.training_data import open_training_data

TITLE = "Host work of a step on one GPU"
COLUMNS = (
    "run",
    "waits per step",
    "limit",
    "passed",
    "launches per step",
    "GPU idle",
    "first step, s",
    "compiled graphs, first step",
    "compiled graphs, later",
    "waiting lines",
)
STEPS, PROFILED_STEPS = real_or_dry(50, 8), 2
MODEL = {
    "vocab_size": 257,
    "hidden_size": 1024,
    "num_layers": real_or_dry(12, 2),
    "num_heads": 16,
    "num_kv_heads": 8,
    "ffn_hidden_size": 2816,
    "max_seq_len": 2048,
}
EXPERTS = {**MODEL, "num_layers": real_or_dry(4, 2), "moe": {"num_experts": 8, "top_k": 2, "expert_ffn_size": 1024}}
EAGER = {"training.compile": False}
COMPILED = {"training.compile": True}
RECOMPUTED = {**COMPILED, "layout.activation_checkpointing": "full"}
VARIANTS: dict[str, dict[str, Any]] = {
    "eager": EAGER,
    "compile": COMPILED,
    "full recomputation, compile": RECOMPUTED,
    "experts": {**EAGER, "model": EXPERTS},
    "experts, full recomputation, compile": {**RECOMPUTED, "model": EXPERTS},
}
NOTES = f"""
A Llama of 12 layers and width 1,024 trains on the source of the standard library as bytes, with masked documents. A
step has 2 micro-batches of 8 rows of 2,048 tokens. Models with experts have 4 layers of 8 experts, 2 of them per token.

"Waits" are the calls of cudaStreamSynchronize, cudaDeviceSynchronize and cudaEventSynchronize per step, in
{PROFILED_STEPS} steps under torch.profiler. "Waiting lines" are the warnings of `torch.cuda.set_sync_debug_mode` and
the calls of torch.cuda.synchronize, in the same number of other steps. "GPU idle" is the share of time without a
kernel, between the first and the last kernel of the profiled steps. "Later" are the {STEPS} steps after the first.
"""
MAX_WAITS = 2
"""Waits per step: one for the sums and the norm, one for the phase times (docs/results/benchmarks/host-syncs.md)."""
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
STEPS_EVENT = "profiled steps"
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx")


def measure(table: Table) -> None:
    """Run the steps of each variant in its own process."""
    for name in VARIANTS:
        table.measure(name, partial(row, table, name))


def row(table: Table, name: str) -> list[str]:
    """Measure a variant."""
    result = run_json("benchmarks.gpu.host", name)
    is_right = IS_DRY or (result["waits"] <= MAX_WAITS and result["later"] == 0)
    lines = "; ".join(f"{count:g} x {line}" for line, count in result["lines"].items())
    cells = [format_value(result["waits"], "g"), MAX_WAITS, table.check(name, is_right)]
    cells += [format_value(result["launches"], ",.0f"), format_value(result["idle"], ".1%"), f"{result['first']:.0f}"]
    return [str(cell) for cell in (*cells, result["graphs"], result["later"], lines)]


def format_value(value: float | None, format_spec: str) -> str:
    return "-" if value is None else format(value, format_spec)


def described_run(changes: dict[str, Any], folder: Path) -> RunSpec:
    """Return the run of a variant."""
    table: dict[str, Any] = {
        "name": "host",
        "output_dir": str(folder),
        "model": MODEL,
        "data": {"train": ["stdlib"], "tokenizer": "bytes"},
        "training": {"steps": 1000, "seq_len": 2048, "tokens_per_step": 16 * 2048, "precision": "bf16"},
        "layout": {"micro_batch_size": 8},
    }
    for key, value in changes.items():
        section, _, field = key.partition(".")
        table[section] = {**table[section], field: value} if field else value
    return run_from_table(table)


def main(name: str) -> None:
    """Run the steps, and print the measurements of the host."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    with tempfile.TemporaryDirectory() as folder:
        run = described_run(VARIANTS[name], Path(folder))
        trainer = Trainer(run, open_training_data(run, prepare(run.data)), Path(folder), device, peak_flops=1e15)
        batches = prefetch(trainer.loader, 0, run.training.steps)
        started_at = time.perf_counter()
        trainer.train_step(batches)
        first_seconds = time.perf_counter() - started_at
        graphs = counters["stats"]["unique_graphs"]
        for _ in range(STEPS):
            trainer.train_step(batches)
        later_graphs = counters["stats"]["unique_graphs"] - graphs
        step = partial(trainer.train_step, batches)
        lines, result = waiting_lines(step), profiled(step)
        batches.close()
    print(json.dumps({**result, "first": first_seconds, "graphs": graphs, "later": later_graphs, "lines": lines}))


def waiting_lines(step: Callable[[], object]) -> dict[str, float]:
    """Return the lines of Phalanx in which the host waits for the GPU, with their number of waits per step."""
    lines: Counter[str] = Counter()

    def note_line() -> None:
        frames = [frame for frame in traceback.extract_stack() if "/phalanx/" in frame.filename]
        lines[f"{frames[-1].filename.split('/phalanx/')[-1]}:{frames[-1].lineno}" if frames else "not in Phalanx"] += 1

    def note_warning(message: Warning | str, *_: object) -> None:
        if "synchronizing CUDA operation" in str(message):
            note_line()

    def note_synchronize(*arguments: Any) -> None:
        note_line()
        synchronize(*arguments)

    synchronize, torch.cuda.synchronize = torch.cuda.synchronize, note_synchronize
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note_warning  # type: ignore[assignment]
        torch.cuda.set_sync_debug_mode("warn")
        for _ in range(PROFILED_STEPS):
            step()
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize = synchronize
    return {line: count / PROFILED_STEPS for line, count in lines.most_common()}


def profiled(step: Callable[[], object]) -> dict[str, float | None]:
    """Return waits and launches per step, and the idle share of the GPU."""
    if IS_DRY:  # CUPTI crashes without a driver
        step()
        return dict.fromkeys(("waits", "launches", "idle"))
    with profile() as profiler, record_function(STEPS_EVENT):
        for _ in range(PROFILED_STEPS):
            step()
    events = list(profiler.events() or [])
    steps = next(event.time_range for event in events if event.name == STEPS_EVENT)
    # The profiler itself waits for the GPU when it stops.
    events = [event for event in events if steps.start <= event.time_range.start <= steps.end]
    calls = Counter(event.name for event in events)
    kernels = sorted(
        (event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation
    )
    return {
        "waits": sum(calls[name] for name in WAITS) / PROFILED_STEPS,
        "launches": sum(calls[name] for name in LAUNCHES) / PROFILED_STEPS,
        "idle": idle_share(kernels),
    }


def idle_share(intervals: list[tuple[float, float]]) -> float | None:
    """Return the share of time from the first start to the last end that no interval covers; None without intervals.

    `intervals` are sorted.
    """
    if not intervals:
        return None
    covered_until, idle = intervals[0][0], 0.0
    for start, end in intervals:
        idle += max(0.0, start - covered_until)
        covered_until = max(covered_until, end)
    return idle / (covered_until - intervals[0][0])


if __name__ == "__main__":
    main(sys.argv[1])

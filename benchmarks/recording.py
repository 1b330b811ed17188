"""Measure the cost of recording a run: steps without records, with the default records, and with the step profiler.

    python -m benchmarks.recording        # prints the table and writes docs/results/benchmarks/recording.md

Two ranks with one thread each run a step of each kind in turn, in the same processes. Step times vary by more than the
cost of recording. Therefore, the recording calls of one step are also timed alone, many times."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.pages import write_results
from phalanx.data.loader import prefetch
from phalanx.runs.create import read_run_directory
from phalanx.spec.files.load import run_from_table
from phalanx.spec.run import RunSpec
from phalanx.testing import rank_pool
from phalanx.train.callbacks.rank_records import open_step_records
from phalanx.train.create_run import create_run
from phalanx.train.profiling.step_phases import StepPhaseTimer
from phalanx.train.profiling.step_profiler import StepProfiler
from phalanx.train.trainer import Trainer
from phalanx.train.training_data import open_training_data

PAGE = Path(__file__).parents[1] / "docs" / "results" / "benchmarks" / "recording.md"
GOAL = 1.01
ROUNDS, CALLS = 60, 1000
SMALL = {
    "vocab_size": 257,
    "hidden_size": 128,
    "num_layers": 4,
    "num_heads": 4,
    "num_kv_heads": 4,
    "ffn_hidden_size": 512,
    "max_seq_len": 128,
}
LARGER = {**SMALL, "hidden_size": 256, "num_layers": 6, "ffn_hidden_size": 1024}
EXPERTS = {**SMALL, "moe": {"num_experts": 8, "top_k": 2, "expert_ffn_size": 256}}
RUNS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "small, ddp": (SMALL, {}),
    "larger, zero3": (LARGER, {"data_parallel": "zero3"}),
    "small, pp 2, 16 micro-batches": (SMALL, {"pp": 2, "micro_batch_size": 1}),
    "experts, ep 2": (EXPERTS, {"ep": 2}),
}


def make_run(out: Path, model: dict[str, Any], layout: dict[str, Any]) -> RunSpec:
    """Return a run of one of RUNS."""
    steps = 3 * ROUNDS + 3
    return run_from_table(
        {
            "name": "run",
            "output_dir": str(out),
            "model": model,
            "data": {"train": [str(Path(json.__file__).parent)], "tokenizer": "bytes", "cache": str(out / "cache")},
            "training": {"steps": steps, "seq_len": 128, "tokens_per_step": 16 * 128, "precision": "fp32"},
            "layout": layout,
            "cluster": {"device": "cpu", "nproc_per_node": 2},
        }
    )


def time_steps(directory: Path) -> tuple[dict[str, list[float]], float]:
    """Measure on a rank the seconds of each kind of step in every round, and of the recording calls of a step."""
    run, data = read_run_directory(directory)
    trainer = Trainer(run, open_training_data(run, data, True), directory, torch.device("cpu"), 1e11)
    notes, batches = open_step_records(trainer), prefetch(trainer.loader, 0, run.training.steps)

    def noted() -> None:
        trainer.train_step(batches)
        notes.write(dict(trainer.step_record or {}))

    def closely() -> None:
        step = trainer.step + 1
        StepProfiler(trainer, range(step - 1, step + 1))(batches)()  # a step of the window without the memory profile
        notes.write(dict(trainer.step_record or {}))

    kinds: dict[str, Callable[[], Any]] = {"off": lambda: trainer.train_step(batches), "light": noted, "full": closely}
    for run_step in kinds.values():
        run_step()
    seconds_by_kind: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(ROUNDS):
        for kind, run_step in kinds.items():
            seconds_by_kind[kind].append(seconds_of(run_step))
    batches.close()
    return seconds_by_kind, recording_seconds(trainer, notes)


def seconds_of(call: Callable[[], Any]) -> float:
    """Return the seconds of a call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def recording_seconds(trainer: Trainer, notes: Any) -> float:
    """Return the seconds of the recording calls of a step: its timestamps, its record and the write of the record."""
    marks, timeline = 3 * len(trainer.strategy.timeline), trainer.strategy.timeline

    def once() -> None:
        phases = StepPhaseTimer(trainer.strategy)
        for name in ("data", "passes", "reduce", "optimizer"):
            phases.end(name)
        for _ in range(marks):
            trainer.strategy.clock.record()
        trainer.strategy.timeline = timeline
        phases.finish()
        line = phases.to_step_record(trainer.step, 0)
        notes.write(dict(line) | {"hot_expert": [0, 0, 1.0], "expert_rows": 1})

    return seconds_of(lambda: [once() for _ in range(CALLS)]) / CALLS


def row(name: str, out: Path) -> tuple[str, float]:
    """Measure a run; return its row and its computed ratio."""
    directory = create_run(make_run(out, *RUNS[name]), 2, resume=False)
    seconds, recording = rank_pool(2).run(time_steps, directory, timeout=1200)[0]
    off = median(seconds["off"])
    light, full = (
        median(b / a for a, b in zip(seconds["off"], seconds[kind], strict=True)) for kind in ("light", "full")
    )
    line = (
        f"| {name} | {off * 1e3:.0f} | {light:.3f} | {full:.2f} | {recording * 1e6:.0f} | {1 + recording / off:.4f} |"
    )
    return line, 1 + recording / off


def main() -> None:
    """Measure, print the table and write the page."""
    with tempfile.TemporaryDirectory() as folder:
        rows, shares = zip(*(row(name, Path(folder) / str(at)) for at, name in enumerate(RUNS)), strict=True)
    worst = max(shares)
    text = f"""# Cost of recording

| run, 2 ranks | step, ms | light / off | full / off | recording calls per step, microseconds | light / off, computed |
|---|---:|---:|---:|---:|---:|
{chr(10).join(rows)}

"Light" is the default of every run. The goal is a computed ratio of at most {GOAL}:
{"met" if worst <= GOAL else "missed"} ({worst:.4f} at most). "Off" is `metrics.per_rank_records = false`, which writes
no records but measures the times in `metrics.jsonl`. "Full" is a step of `--profile-steps`. The profiled step that also
measures memory takes several times as long.

The measured ratios are medians over {ROUNDS} rounds, each with one step of each kind. Neighboring steps differ by more
than the cost of light recording. Therefore, the recording calls of a step are also timed alone, {CALLS:,} times. The
computed ratio adds their time to that of a step without recording.

Written by `python -m benchmarks.recording`, with {torch.get_num_threads()} thread per rank.
"""
    print(text)
    write_results(PAGE, text)


if __name__ == "__main__":
    from benchmarks import recording  # ranks cannot import objects of __main__

    recording.main()

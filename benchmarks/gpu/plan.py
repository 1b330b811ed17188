"""Compare measured and planned memory and time from the command line: bench, short runs, calibrate, and plan again."""

from __future__ import annotations

import json
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu.harness import Table, real_or_dry, run_phalanx, settings, step_records
from phalanx.plan.predicted_vs_measured import TOTAL

TITLE = "Measured and planned memory and time on one GPU"
COLUMNS = (
    "run",
    "ms per step",
    "allocated, GiB",
    "predicted",
    "error",
    "planned ms, before",
    "error",
    "calibrated",
    "error",
    "error by the other runs",
)
NOTES = """
A Llama of 16 layers and width 2,048 (1.1B parameters) has 4 rows of 4,096 tokens per step. A model with 8 experts has 8
layers. "Allocated" is the peak of tensor memory in a step (`--profile-memory`), and "predicted" is that of
`phalanx memory`. "Before" is the plan with the preset h100. "Calibrated" is the plan after `phalanx calibrate` with all
runs and `phalanx bench`. "By the other runs" is calibrated without that run. Each run has two rows: its memory after
the run, and its times after all runs.
"""
STEPS = 12
RUN = f"""
name = "run"
[model]
vocab_size = 32000
hidden_size = {real_or_dry(2048, 256)}
num_layers = {real_or_dry(16, 2)}
num_heads = 16
num_kv_heads = 8
ffn_hidden_size = {real_or_dry(8192, 512)}
max_seq_len = 4096
[data]
train = [{real_or_dry("'stdlib'", f"'{Path(json.__file__).parent}'")}]
tokenizer = "bytes"
[training]
steps = {STEPS}
seq_len = {real_or_dry(4096, 256)}
tokens_per_step = {4 * real_or_dry(4096, 256)}
precision = "bf16"
[checkpoint]
every = 0
[evaluation]
tokens = 4096
"""
EXPERTS = ("model.moe.num_experts=8", "model.moe.top_k=2", f"model.moe.expert_ffn_size={real_or_dry(2048, 128)}")
RUNS: dict[str, tuple[str, ...]] = {
    "ddp-1": ("layout.micro_batch_size=1",),
    "ddp-4": ("layout.micro_batch_size=4",),
    "ddp-2": ("layout.micro_batch_size=2",),
    "ddp-2-eager": ("layout.micro_batch_size=2", "training.compile=false"),
    "ddp-2-full": ("layout.micro_batch_size=2", "layout.activation_checkpointing=full"),
    "ddp-2-selective": ("layout.micro_batch_size=2", "layout.activation_checkpointing=selective"),
    "zero1-2": ("layout.micro_batch_size=2", "layout.data_parallel=zero1"),
    "zero3-2": ("layout.micro_batch_size=2", "layout.data_parallel=zero3"),
    "zero1-2-offload": ("layout.micro_batch_size=2", "layout.data_parallel=zero1", "layout.offload=cpu"),
    "experts-2": ("layout.micro_batch_size=2", "model.num_layers=8", *EXPERTS),
}


def measure(table: Table) -> None:
    """Bench, train each run, calibrate, and compare."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "run.toml").write_text(RUN)
        table.measure("bench", lambda: [last_line(run_phalanx(place, "bench", "run.toml", "--out", "measured.json"))])
        for name, changes in RUNS.items():
            table.measure(name, partial(memory_row, table, place, name, changes))
        calibrated: dict[str, Any] = {}
        table.measure("calibrate", partial(calibrate, place, calibrated))
        for run in calibrated.get("runs", []):
            table.measure(run["name"], partial(time_row, run))
        table.measure("plan", partial(plan_row, place, calibrated))


def memory_row(table: Table, place: Path, name: str, changes: tuple[str, ...]) -> list[str]:
    """Train a run, and compare its tensor memory with the prediction."""
    run_phalanx(place, "train", "run.toml", "--profile-memory", *settings(f"name={name}", *changes))
    rows = json.loads((place / "runs" / name / "measured/comparison.json").read_text())
    (total,) = (row for row in rows if row["quantity"] == TOTAL)
    seconds = sorted(record["step_seconds"] for record in step_records(place, name))[STEPS // 2]
    off = total["measured"] / total["predicted"] - 1
    table.check(f"{name}, memory", abs(off) < 0.05)
    gib = (f"{total[key] / 2**30:.2f}" for key in ("measured", "predicted"))
    return [f"{seconds * 1e3:.0f}", *gib, f"{off:+.1%}"]


def calibrate(place: Path, calibrated: dict[str, Any]) -> list[str]:
    """Calibrate the planner with the finished runs; `calibrated` receives the result."""
    runs = [f"runs/{name}" for name in RUNS if (place / "runs" / name / "metrics.jsonl").exists()]
    files = [file.name for file in place.glob("measured.json")]
    text = run_phalanx(place, "calibrate", *runs, *files, "--machine", "h100", "--out", "here.toml", "--json")
    calibrated |= json.JSONDecoder().raw_decode(text[text.index("{") :])[0]
    return [f"{len(runs)} runs and {len(files)} files of bench"]


def time_row(run: dict[str, Any]) -> list[str]:
    """Compare a run's step with the plan before and after."""
    measured = run["step_seconds"]

    def cells(key: str) -> list[str]:
        return [f"{run[key] * 1e3:.0f}", f"{run[key] / measured - 1:+.1%}"]

    off_by_others = f"{run['left_out_seconds'] / measured - 1:+.1%}"
    return [f"{measured * 1e3:.0f}", "", "", "", *cells("before_seconds"), *cells("after_seconds"), off_by_others]


def plan_row(place: Path, calibrated: dict[str, Any]) -> list[str]:
    """Plan with the calibrated machine, and compare the choice with the fastest run."""
    machine = "here.toml" if (place / "here.toml").exists() else "h100"
    text = run_phalanx(place, "plan", "run.toml", "--machine", machine, "--nproc", "1", "--top", "3", "--json")
    best = json.JSONDecoder().raw_decode(text[text.index("{") :])[0]["layouts"][0]
    runs = sorted(calibrated.get("runs", []), key=lambda run: run["step_seconds"])
    fastest = f"; the fastest run was {runs[0]['name']}, {runs[0]['step_seconds'] * 1e3:.0f} ms" if runs else ""
    return [f"{best['candidate']}, {best['step_seconds'] * 1e3:.0f} ms{fastest}"]


def last_line(text: str) -> str:
    return text.strip().splitlines()[-1][:160]

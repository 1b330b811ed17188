"""Check complete runs from the command line on one GPU, and compare their memory with the plan."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.gpu.harness import IS_DRY, Table, real_or_dry, run_phalanx, settings, step_records
from phalanx.plan.predicted_vs_measured import TOTAL

TITLE = "Complete runs on one GPU"
COLUMNS = ("check", "outcome", "seconds")
NOTES = "The `tiny` preset trains on the source of the standard library, from the command line."
TEXT = real_or_dry("'stdlib'", f"'{Path(json.__file__).parent}'")
RUN = f"""
name = "run"
[model]
preset = "tiny"
[data]
train = [{TEXT}]
tokenizer = "bytes"
[training]
steps = {real_or_dry(40, 12)}
seq_len = 512
tokens_per_step = {real_or_dry(16384, 1024)}
[evaluation]
tokens = {real_or_dry(8192, 1024)}
[checkpoint]
every = 10
"""


def measure(table: Table) -> None:
    """Run each check in its own folder."""
    with tempfile.TemporaryDirectory() as folder:
        for name, check in CHECKS.items():
            table.measure(name, partial(outcome, check, Path(folder) / name.replace(" ", "-")))


def outcome(check: Callable[[Path], str], place: Path) -> list[str]:
    """Run a check; return its cells."""
    place.mkdir()
    (place / "run.toml").write_text(RUN)
    started_at = time.perf_counter()
    return [check(place), f"{time.perf_counter() - started_at:.0f}"]


def train(place: Path) -> str:
    run_phalanx(place, "train", "run.toml")
    records = step_records(place)
    return f"loss {records[0]['loss']:.3f} to {records[-1]['loss']:.3f}, MFU {records[-1].get('mfu', 0):.1%}"


def equals_cpu(place: Path) -> str:
    """Compare the losses in fp32 with those of the CPU."""
    losses = []
    for device in ("cuda", "cpu"):
        (place / device).mkdir()
        (place / device / "run.toml").write_text(RUN)
        sets = ["training.precision=fp32", "training.steps=5", f"cluster.device={device}"]
        run_phalanx(place / device, "train", "run.toml", *settings(*sets))
        losses.append([record["loss"] for record in step_records(place / device)])
    difference = max(abs(a - b) / b for a, b in zip(*losses, strict=True))
    assert IS_DRY or difference < 1e-4, f"losses differ by {difference:.1e}"
    return f"losses differ by {difference:.1e} in five steps of fp32"


def profile(place: Path) -> str:
    """Profile memory and traffic of one step, profile steps, and report."""
    output = run_phalanx(place, "train", "run.toml", "--profile-memory")
    (place / "steps").mkdir()
    (place / "steps" / "run.toml").write_text(RUN)
    run_phalanx(place / "steps", "train", "run.toml", "--profile-steps", "10:12")
    run_phalanx(place / "steps", "report", "runs/run")
    totals = [" ".join(line.split()) for line in output.splitlines() if TOTAL in line.split()[:3]]
    assert totals, output[-1500:]
    return "; ".join(totals)


def eager(place: Path) -> str:
    run_phalanx(place, "train", "run.toml", *settings("training.compile=false", "training.steps=60"))
    records = step_records(place)
    return f"loss {records[-1]['loss']:.3f}, {records[-1]['tokens_per_second']:,.0f} tokens/s"


def experts(place: Path) -> str:
    sets = ("model.moe.num_experts=8", "model.moe.top_k=2", "model.moe.expert_ffn_size=256")
    run_phalanx(place, "train", "run.toml", *settings(*sets))
    return f"loss {step_records(place)[-1]['loss']:.3f}"


def offload(place: Path) -> str:
    run_phalanx(place, "train", "run.toml", *settings("layout.data_parallel=zero2", "layout.offload=cpu"))
    return f"loss {step_records(place)[-1]['loss']:.3f}"


def bench(place: Path) -> str:
    """Measure the speed of the machine for the shapes of the run."""
    text = run_phalanx(place, "bench", "run.toml")
    return " / ".join(line.strip() for line in text.splitlines()[:6])[:300]


def doctor(place: Path) -> str:
    """Run the doctor, which must print its findings."""
    text = run_phalanx(place, "doctor", "--quick", expected_exit_codes=(0, 1))
    return " / ".join(text.strip().splitlines()[-2:])[:200]


CHECKS: dict[str, Callable[[Path], str]] = {
    "train": train,
    "fp32 equals CPU": equals_cpu,
    "profile": profile,
    "not compiled": eager,
    "experts": experts,
    "zero2, offload": offload,
    "bench": bench,
    "doctor": doctor,
}

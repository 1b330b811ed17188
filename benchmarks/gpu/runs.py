"""Whole runs by the command line on one GPU: each must end as it should; memory beside the plan."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

TITLE = "Whole runs on one GPU"
LIMIT_SECONDS = 120.0
RUN = """
name = "run"
[model]
preset = "tiny"
[data]
train = ["stdlib"]
tokenizer = "bytes"
[training]
steps = 40
seq_len = 512
tokens_per_step = 16384
[evaluation]
tokens = 8192
[checkpoint]
every = 10
"""


def measure() -> str:
    """Run each check; returns the page's text."""
    lines = ["| what | outcome | seconds |", "|---|---|---:|"]
    with tempfile.TemporaryDirectory() as folder:
        for name, check in CHECKS.items():
            place = Path(folder) / name.replace(" ", "-")
            place.mkdir()
            started_at = time.perf_counter()
            try:
                outcome = check(place)
            except (AssertionError, subprocess.SubprocessError, OSError) as problem:
                outcome = f"**{type(problem).__name__}**: {str(problem).strip().splitlines()[-1][:160]}"
            lines.append(f"| {name} | {outcome} | {time.perf_counter() - started_at:.0f} |")
            print(lines[-1], flush=True)
    return "\n".join(lines)


def command(place: Path, *arguments: str) -> list[str]:
    (place / "run.toml").write_text(RUN)
    return [sys.executable, "-m", "phalanx", *arguments]


def phalanx(place: Path, *arguments: str) -> str:
    """Run a command in a folder; returns what it printed. Raises AssertionError if it failed."""
    done = subprocess.run(
        command(place, *arguments), cwd=place, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr).strip()[-1500:]
    return done.stdout


def metrics(place: Path) -> list[dict[str, float]]:
    """The records of a run's steps."""
    lines = (place / "runs/run/metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if "loss" in record]


def train(place: Path) -> str:
    phalanx(place, "train", "run.toml")
    records = metrics(place)
    return f"loss {records[0]['loss']:.3f} to {records[-1]['loss']:.3f}, MFU {records[-1].get('mfu', 0):.1%}"


def equals_cpu(place: Path) -> str:
    """In fp32 the CPU's losses."""
    losses = []
    for device in ("cuda", "cpu"):
        (place / device).mkdir()
        sets = ["training.precision=fp32", "training.steps=5", f"cluster.device={device}"]
        phalanx(place / device, "train", "run.toml", *(part for pair in sets for part in ("--set", pair)))
        losses.append([record["loss"] for record in metrics(place / device)])
    difference = max(abs(a - b) / b for a, b in zip(*losses, strict=True))
    assert difference < 1e-4, f"losses differ by {difference:.1e}"
    return f"losses differ by {difference:.1e} in five steps of fp32"


def resume_after_kill(place: Path) -> str:
    """Killed behind a checkpoint, a rank starts again and learns on."""
    process = subprocess.Popen(
        command(place, "train", "run.toml", "--set", "training.steps=4000"),
        cwd=place,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    deadline = time.monotonic() + LIMIT_SECONDS
    checkpoints = place / "runs/run/checkpoints"
    while not (checkpoints.is_dir() and any(checkpoints.glob("step-*[0-9]"))):
        assert process.poll() is None, "the run ended"
        assert time.monotonic() < deadline, "no checkpoint"
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    reached = metrics(place)[-1]["step"]
    sets = ("--set", f"training.steps={int(reached) + 20}")
    phalanx(place, "train", "run.toml", "--resume", *sets)
    records = metrics(place)
    return f"killed at step {reached}, resumed at {records[-1]['resumed_at_step']}, ended at {records[-1]['step']}"


def profile(place: Path) -> str:
    """Memory and traffic of one step beside the prediction, and steps looked at closely."""
    output = phalanx(place, "train", "run.toml", "--profile-memory")
    (place / "steps").mkdir()
    phalanx(place / "steps", "train", "run.toml", "--profile-steps", "10:12")
    phalanx(place / "steps", "report", "runs/run")
    return " / ".join(line.strip() for line in output.splitlines() if "memory" in line.lower())[:300] or "ran"


def compiled(place: Path) -> str:
    phalanx(place, "train", "run.toml", "--set", "training.compile=true", "--set", "training.steps=60")
    records = metrics(place)
    return f"loss {records[-1]['loss']:.3f}, {records[-1]['tokens_per_second']:,.0f} tokens/s"


def experts(place: Path) -> str:
    sets = ("model.moe.num_experts=8", "model.moe.top_k=2", "model.moe.expert_ffn_size=256")
    phalanx(place, "train", "run.toml", *(part for pair in sets for part in ("--set", pair)))
    return f"loss {metrics(place)[-1]['loss']:.3f}"


def offload(place: Path) -> str:
    phalanx(place, "train", "run.toml", "--set", "layout.data_parallel=zero2", "--set", "layout.offload=cpu")
    return f"loss {metrics(place)[-1]['loss']:.3f}"


def bench(place: Path) -> str:
    """The machine's own speeds at the run's shapes."""
    text = phalanx(place, "bench", "run.toml")
    return " / ".join(line.strip() for line in text.splitlines()[:6])[:300]


def doctor(place: Path) -> str:
    done = subprocess.run(
        command(place, "doctor", "--quick"),
        cwd=place,
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return " / ".join(done.stdout.strip().splitlines()[-2:])[:200]


CHECKS: dict[str, Callable[[Path], str]] = {
    "train": train,
    "fp32 equals CPU": equals_cpu,
    "kill and resume": resume_after_kill,
    "profile": profile,
    "compile": compiled,
    "experts": experts,
    "zero2, offload": offload,
    "bench": bench,
    "doctor": doctor,
}

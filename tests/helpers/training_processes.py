"""Training in separate processes, and its records."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from phalanx.runs.events import read_events
from phalanx.runs.metrics import read_metrics
from phalanx.spec.files.write import to_toml
from phalanx.testing.processes import POLL_SECONDS, WAIT_SECONDS, rank_pids, start_python, wait_until
from tests.helpers.small_runs import make_trainer, small_run, train_until

STEPS = 24
SHORT = {"training.steps": STEPS, "checkpoint.every": 5}
LONG = {"training.steps": 100_000, "checkpoint.every": 5}


@contextmanager
def training_run(
    text: Path, folder: Path, changes: dict[str, Any], nproc: int = 2, *options: str
) -> Iterator[subprocess.Popen[str]]:
    """Yield a running run in folder/parity; kill all its processes at the end."""
    folder.mkdir(exist_ok=True)
    file = folder / "run.toml"
    file.write_text(to_toml(small_run(text, folder, changes)))
    command = [sys.executable, "-m", "phalanx", "train", str(file), "--nproc", str(nproc), *options]
    process = start_python(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait(timeout=WAIT_SECONDS)
        wait_until(lambda: not rank_pids(folder / "parity"), "no rank is left")


def has_reached_step(directory: Path, step: int) -> Callable[[], bool]:
    return lambda: (directory / "metrics.jsonl").exists() and any(r["step"] >= step for r in read_metrics(directory))


def recorded_losses(directory: Path) -> list[tuple[float, float]]:
    return [(record["loss"], record["grad_norm"]) for record in read_metrics(directory) if "loss" in record]


def single_process_losses(folder: Path, changes: dict[str, Any], count: int) -> list[Any]:
    """Return losses and gradient norms of the first steps on one rank without failures, as a reference."""
    trainer = make_trainer(small_run(Path(json.__file__).parent, folder / "one", changes))
    return [pytest.approx(step, rel=1e-10) for step in train_until(trainer, count)]


def events_of_kind(directory: Path, kind: str) -> list[Any]:
    return [event for event in read_events(directory) if event["kind"] == kind]


def wait_for_steps(process: subprocess.Popen[str], directory: Path, count: int) -> None:
    deadline = time.monotonic() + 100
    while not ((directory / "metrics.jsonl").exists() and len(read_metrics(directory)) > count):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(POLL_SECONDS)

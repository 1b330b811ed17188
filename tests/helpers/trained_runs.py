"""Trained runs, one of each per test process, to read, and to copy and damage."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from phalanx.runs.events import FINISHED, append_event
from phalanx.spec.files.write import to_toml
from phalanx.testing.processes import run_python
from tests.helpers.small_runs import DENSE, MOE, small_run

TIMEOUT_SECONDS = 240


@cache
def two_rank_run() -> Path:
    """Return a run of two data-parallel ranks and a dense model, without profiled steps."""
    return train_run("two", 2, {"model": DENSE})


@cache
def hybrid_run() -> Path:
    """Return a run of four ranks: two replicas of a pipeline of two
    stages, ZeRO-2 and experts, with two profiled steps."""
    layout = {"layout.data_parallel": "zero2", "layout.pp": 2, "layout.micro_batch_size": 1}
    return train_run("hybrid", 4, {"model": MOE, **layout}, "--profile-steps", "5:6", "--profile-memory")


@cache
def mixture_run() -> Path:
    """Return a run of one rank on a mixture of two sources, `json` and `email`, with two evaluations."""
    library = Path(json.__file__).parents[1]
    source = [{"name": name, "path": str(library / name), "weight": 1} for name in ("json", "email")]
    data = {"source": source, "tokenizer": "bytes", "cache": tempfile.mkdtemp(prefix="phalanx-report-cache-")}
    atexit.register(shutil.rmtree, data["cache"], ignore_errors=True)
    return train_run("mixture", 1, {"model": DENSE, "data": data})


def read_source_losses(run: Path) -> dict[str, list[float]]:
    """Return the training losses of both sources of `mixture_run` in each step."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    return {name: [line[f"loss/{name}"] for line in steps] for name in ("json", "email")}


def train_run(name: str, ranks: int, changes: dict[str, Any], *options: str) -> Path:
    """Run `phalanx train`, and return the run directory."""
    file = write_run_file(name, changes)
    run_python(
        train_command(file, ranks, *options),
        env=single_threaded_environment(),
        check=True,
        timeout=TIMEOUT_SECONDS,
    )
    return file.parent / name


def write_run_file(name: str, changes: dict[str, Any]) -> Path:
    """Write a run file of eight steps in the parent of its run directory."""
    folder = Path(tempfile.mkdtemp(prefix="phalanx-report-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    short = {"name": name, "training.steps": 8, "training.precision": "bf16", "evaluation.every": 4, **changes}
    file = folder / f"{name}.toml"
    file.write_text(to_toml(small_run(Path(json.__file__).parent, folder, {**short, "cluster.device": "cpu"})))
    return file


def train_command(file: Path, ranks: int, *options: str) -> list[str]:
    """Return the command that trains a run file."""
    return [sys.executable, "-m", "phalanx", "train", str(file), "--nproc", str(ranks), *options]


def wait_for(process: subprocess.Popen[bytes], is_there: Callable[[], bool]) -> None:
    """Wait until a running run has created something; fail if the run ends or takes too long."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not is_there():
        assert process.poll() is None, f"it ended with {process.returncode}"
        assert time.monotonic() < deadline
        time.sleep(0.05)


def single_threaded_environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def copy_run(run: Path, folder: Path) -> Path:
    """Copy a run directory, to damage it."""
    return Path(shutil.copytree(run, folder / run.name))


def stop_after(run: Path, step: int) -> None:
    """Remove the records of later steps from a run directory, as if a signal had stopped the run after this step."""
    for file in [run / "metrics.jsonl", *(run / "trace").glob("*.jsonl")]:
        lines = file.read_text().splitlines(keepends=True)
        opening = [lines[0]] if file.parent.name == "trace" else []
        kept_lines = (line for line in lines[len(opening) :] if json.loads(line)["step"] <= step)
        file.write_text("".join([*opening, *kept_lines]))
    append_event(run, FINISHED, step=step)

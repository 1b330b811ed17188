"""Runs that were really trained, once per process of tests, to read and to damage copies of."""

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

from phalanx.spec.files.write import to_toml
from tests.helpers.small_runs import DENSE, MOE, described

SECONDS = 240


@cache
def two_ranks() -> Path:
    """Two data-parallel ranks of a dense model; nothing was looked at closely."""
    return trained("two", 2, {"model": DENSE})


@cache
def hybrid() -> Path:
    """Four ranks: a pipeline of two stages, twice, under ZeRO-2, with experts; two steps were looked at closely."""
    layout = {"layout.data_parallel": "zero2", "layout.pp": 2, "layout.micro_batch_size": 1}
    return trained("hybrid", 4, {"model": MOE, **layout}, "--profile-steps", "5:6", "--profile-memory")


def trained(name: str, ranks: int, changes: dict[str, Any], *options: str) -> Path:
    """The directory of a run that `phalanx train` did."""
    file = run_file(name, changes)
    subprocess.run(command(file, ranks, *options), env=environment(), check=True, timeout=SECONDS, capture_output=True)
    return file.parent / name


def run_file(name: str, changes: dict[str, Any]) -> Path:
    """A run of eight steps; its directory will be beside it."""
    folder = Path(tempfile.mkdtemp(prefix="phalanx-report-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    short = {"name": name, "training.steps": 8, "training.precision": "bf16", "evaluation.every": 4, **changes}
    file = folder / f"{name}.toml"
    file.write_text(to_toml(described(Path(json.__file__).parent, folder, {**short, "cluster.device": "cpu"})))
    return file


def command(file: Path, ranks: int, *options: str) -> list[str]:
    """That trains it."""
    return [sys.executable, "-m", "phalanx", "train", str(file), "--nproc", str(ranks), *options]


def wait(process: subprocess.Popen[bytes], begun: Callable[[], bool]) -> None:
    """Until something is there that a run makes; fails if the run ends, or takes too long."""
    deadline = time.monotonic() + SECONDS
    while not begun():
        assert process.poll() is None, f"it ended with {process.returncode}"
        assert time.monotonic() < deadline
        time.sleep(0.05)


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def copied(run: Path, folder: Path) -> Path:
    """A run's directory, to damage."""
    return Path(shutil.copytree(run, folder / run.name))

"""Shared functions of the parts: a table that continues after failed rows, times and errors of kernels, commands."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch
from torch import Tensor

from tests.null_gpu import is_null_gpu

IS_DRY = is_null_gpu()
"""True on a null GPU, which computes nothing (tests/null_gpu): all code runs, and no number is compared."""
if IS_DRY:  # numbers for this process and its child processes
    from tests.null_gpu.given_numbers import give_numbers

    give_numbers()
    os.environ["PYTHONPATH"] = os.pathsep.join([f"{Path(__file__).parent}/dry", os.environ.get("PYTHONPATH", "")])
PART_SECONDS = 3600.0 if IS_DRY else 440.0
"""Time after which no row of a part starts."""
COMMAND_SECONDS = 900.0 if IS_DRY else 120.0
WARM_UP, REPEATS = (1, 1) if IS_DRY else (3, 10)
Value = TypeVar("Value")


def real_or_dry(real: Value, dry: Value) -> Value:
    """Return `dry` on a null GPU, to save time, and otherwise `real`."""
    return dry if IS_DRY else real


def require_on_device(feature: str) -> None:
    """Raise NotRunError on a null GPU, for a row that needs a feature of a real GPU."""
    if IS_DRY:
        raise NotRunError(f"the null GPU has no {feature}")


class NotRunError(Exception):
    """Row that cannot run on this machine, which does not count as a failure."""


class Table:
    """Table in Markdown, which prints each row when it is added."""

    def __init__(self, columns: Sequence[str]) -> None:
        self.columns, self.lines = columns, [f"| {' | '.join(columns)} |", "|---" + "|---:" * (len(columns) - 1) + "|"]
        self.failures: list[str] = []
        """Names of failed rows and of rows with wrong results."""
        self.deadline = time.monotonic() + PART_SECONDS

    def measure(self, name: str, row: Callable[[], Sequence[object]]) -> None:
        """Add the row that `row` returns, or the reason of its failure."""
        if time.monotonic() > self.deadline:
            self.add(name, "not run: time limit of the part")
            self.failures.append(name)
            return
        try:
            cells = row()
        except NotRunError as reason:
            cells = [f"not run: {reason}"]
        except Exception as error:
            self.failures.append(name)
            message = next((line for line in str(error).strip().splitlines()[::-1] if line.strip()), "")
            cells = [f"**{type(error).__name__}**: {message.strip()[:200]}"]
        self.add(name, *cells)
        torch.cuda.empty_cache()

    def add(self, name: str, *cells: object) -> None:
        """Add a row; missing cells are empty."""
        texts = [name, *map(str, cells)]
        texts += [""] * (len(self.columns) - len(texts))
        self.lines.append("| " + " | ".join(text.replace("|", "/").replace("\n", " ") for text in texts) + " |")
        print(self.lines[-1], flush=True)

    def check(self, name: str, is_right: bool) -> str:
        """Return "yes" or "**no**", which counts as a failure."""
        if IS_DRY:
            return "dry"
        if not is_right:
            self.failures.append(name)
        return "yes" if is_right else "**no**"


def median_milliseconds(call: Callable[[], object], repeats: int = REPEATS) -> float:
    """Return the median time of a call on the device, between CUDA events, after WARM_UP calls."""
    for _ in range(WARM_UP):
        call()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return median(times)


def relative_error(got: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the largest difference, relative to the largest value of each tensor; NaN if a value is not finite."""
    largest = 0.0
    for ours, right in zip(got, expected, strict=True):
        assert ours.shape == right.shape, f"{tuple(ours.shape)} is not {tuple(right.shape)}"
        if not ours.isfinite().all():
            return float("nan")
        if right.numel():
            difference = float((ours.double() - right.double().to(ours.device)).abs().max())
            largest = max(largest, difference / max(float(right.abs().max()), 1e-30))
    return largest


def run_phalanx(folder: Path, *arguments: str, expected_exit_codes: Sequence[int] = (0,)) -> str:
    """Run a command of Phalanx in a folder; return its output.

    Raises AssertionError with the end of the output if the exit code is not expected.
    """
    command = [sys.executable, "-m", "phalanx", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False)
    output = done.stdout + done.stderr
    assert done.returncode in expected_exit_codes, f"exit code {done.returncode}: {output.strip()[-1500:]}"
    assert "Traceback" not in output, output.strip()[-1500:]
    return output


def run_json(module: str, *arguments: str, seconds: float = COMMAND_SECONDS) -> dict[str, Any]:
    """Run a module in its own process, which can use all memory of the GPU; return the JSON of its last line.

    Raises RuntimeError with its last line if it fails, and subprocess.TimeoutExpired.
    """
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    if done.returncode:
        print(done.stderr[-1500:], file=sys.stderr, flush=True)
        reason = signal.Signals(-done.returncode).name if done.returncode < 0 else f"exit code {done.returncode}"
        raise RuntimeError(done.stderr.strip().splitlines()[-1] if done.returncode == 1 else reason)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def settings(*pairs: str) -> list[str]:
    """Return `--set` for each KEY=VALUE."""
    return [part for pair in pairs for part in ("--set", pair)]


def step_records(folder: Path, name: str = "run") -> list[dict[str, Any]]:
    """Return the records of a run's steps."""
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if "loss" in record]

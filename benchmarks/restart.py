"""Measure the time until ranks train, after the kill of a rank and after the command.

    python -m benchmarks.restart       # two minutes, alone on the machine; writes docs/results/benchmarks/restart.md

Two ranks train a tiny model. A rank is killed (SIGKILL), and the time to the next step is measured. In a second series,
the warm process of the launcher is killed first, so that ranks start as new processes. The time to the first step of
`phalanx train` is compared with that of torchrun."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from benchmarks.copies import count_events
from benchmarks.pages import write_results
from phalanx.runs.events import STARTED, read_events
from phalanx.runs.metrics import read_metrics
from phalanx.spec.files.load import run_from_table
from phalanx.spec.files.write import to_toml
from phalanx.testing.processes import rank_pids, wait_until, warm_process_pid

PAGE = Path(__file__).parents[1] / "docs" / "results" / "benchmarks" / "restart.md"
KILLS, STARTS = 10, 5
SETTLE_SECONDS = 4.0
"""Steady training before each kill, in which the warm process finishes its imports."""


def run_file(folder: Path) -> Path:
    """Write a run of the tiny model without an end; return its file."""
    run = run_from_table(
        {
            "name": "restart",
            "output_dir": str(folder),
            "model": {"preset": "tiny"},
            "data": {"cache": str(folder / "cache"), "tokenizer": "bytes"},
            "training": {"steps": 10**6, "seq_len": 128, "tokens_per_step": 2048, "precision": "fp32"},
            "optimizer": {"lr_schedule": "none"},
            "checkpoint": {"every": 5},
            "cluster": {"device": "cpu"},
        }
    )
    file = folder / "run.toml"
    file.write_text(to_toml(run))
    return file


def has_stepped(directory: Path, starts: int) -> bool:
    """Return whether a step is finished since start number `starts`."""
    if count_events(directory, STARTED) < starts:
        return False
    start = [event["step"] for event in read_events(directory) if event["kind"] == STARTED][-1]
    records = read_metrics(directory)
    is_first = starts == 1
    return any(line["step"] > start and (is_first or line.get("resumed_at_step") == start) for line in records)


def restart_seconds(file: Path, kills: int, is_warm: bool) -> list[float]:
    """Kill a rank `kills` times; return the seconds from each kill to the next step."""
    directory, seconds = file.parent / "restart", []
    command = [sys.executable, "-m", "phalanx", "train", str(file), "--nproc", "2", "--resume"]
    num_starts = count_events(directory, STARTED) if directory.exists() else 0
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as launcher:
        try:
            wait_until(lambda: has_stepped(directory, num_starts + 1), "a first step")
            for number in range(kills):
                time.sleep(SETTLE_SECONDS)
                if not is_warm and number == 0:
                    os.kill(warm_process_pid(launcher.pid), signal.SIGKILL)
                os.kill(rank_pids(directory)[1], signal.SIGKILL)
                start = time.monotonic()
                wait_until(lambda starts=num_starts + number + 2: has_stepped(directory, starts), "a step")
                seconds.append(time.monotonic() - start)
        finally:
            launcher.send_signal(signal.SIGTERM)
            launcher.wait(timeout=100)
    return seconds


def first_step_seconds(file: Path, command: Sequence[str]) -> float:
    """Start a run; return the seconds from the command to its first step."""
    directory = file.parent / "restart"
    start = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            wait_until(lambda: directory.exists() and has_stepped(directory, 1), "a first step")
            return time.monotonic() - start
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=100)


def row(interval: str, seconds: Sequence[float], reference: Sequence[float]) -> str:
    """Format a row of the table."""
    ratio = median(seconds) / median(reference)
    return f"| {interval} | {median(seconds):.2f} | {min(seconds):.2f} to {max(seconds):.2f} | {ratio:.2f} |"


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="phalanx-restart-") as name:
        file = run_file(Path(name))
        warm, cold = (restart_seconds(file, KILLS, is_warm) for is_warm in (True, False))
    phalanx = [sys.executable, "-m", "phalanx", "train", "{file}", "--nproc", "2"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    torchrun += ["-m", "phalanx.train", "{file}"]
    seconds_by_command: dict[str, list[float]] = {"phalanx train": [], "torchrun": []}
    for _ in range(STARTS):
        for launcher, command in (("phalanx train", phalanx), ("torchrun", torchrun)):
            with tempfile.TemporaryDirectory(prefix="phalanx-restart-") as name:
                file = run_file(Path(name))
                seconds_by_command[launcher].append(
                    first_step_seconds(file, [word.format(file=file) for word in command])
                )
    text = f"""# Time until ranks train

| interval | seconds, median | range | ratio |
|---|---:|---:|---:|
{row("kill of a rank (SIGKILL) to the next step, ranks forked from the warm process", warm, cold)}
{row("kill of a rank (SIGKILL) to the next step, ranks started as new processes", cold, cold)}
{row("`phalanx train` to the first step", seconds_by_command["phalanx train"], seconds_by_command["torchrun"])}
{row("`torchrun -m phalanx.train` to the first step", seconds_by_command["torchrun"], seconds_by_command["torchrun"])}

Target: a restart within 1.0 s: {"met" if median(warm) <= 1 else "missed"}.

- Two ranks under DDP train the preset `tiny` in fp32 on {os.cpu_count()} cores, with {KILLS} kills or {STARTS} starts
  per row.
- Written by `python -m benchmarks.restart`.
"""
    print(text)
    write_results(PAGE, text)


if __name__ == "__main__":
    main()

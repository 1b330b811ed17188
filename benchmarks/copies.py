"""Measure in-memory checkpoints: the steps lost by a rank killed at a random step, and the time of a copy.

    python -m benchmarks.copies       # some minutes; prints the table and writes docs/results/benchmarks/copies.md

Two ranks train with `recovery.in_memory_checkpoint_every = 1` and without checkpoints on disk. A random rank is killed
at a random time, twenty times. Lost steps are steps that both ranks had finished and that were repeated."""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean, median

from benchmarks.pages import write_results
from phalanx.report.run_data import read_run
from phalanx.runs.events import FAILED, STARTED, read_events
from phalanx.runs.metrics import read_metrics
from phalanx.runs.step_records import rank_record_file
from phalanx.spec.files.load import run_from_table
from phalanx.spec.files.write import to_toml
from phalanx.testing.processes import rank_pids, wait_until

PAGE = Path(__file__).parents[1] / "docs" / "results" / "benchmarks" / "copies.md"
MODEL = {
    "vocab_size": 2048,
    "hidden_size": 192,
    "num_layers": 3,
    "num_heads": 3,
    "ffn_hidden_size": 512,
    "max_seq_len": 1024,
}
LATEST_SECONDS = 2.0
"""Maximum time from the first step of a start until a rank is killed."""


def run_file(folder: Path) -> Path:
    """Write the run file of a run without an end, and return its path."""
    run = run_from_table(
        {
            "name": "copies",
            "output_dir": str(folder),
            "model": MODEL,
            "data": {"cache": str(folder / "cache"), "tokenizer": "bytes"},
            "training": {"steps": 10**6, "seq_len": 128, "tokens_per_step": 2048, "precision": "fp32"},
            "optimizer": {"lr_schedule": "none"},
            "checkpoint": {"every": 0},
            "recovery": {"in_memory_checkpoint_every": 1},
            "cluster": {"device": "cpu"},
        }
    )
    file = folder / "run.toml"
    file.write_text(to_toml(run))
    return file


def lost_steps(directory: Path, kills: int, chance: random.Random) -> list[int]:
    """Kill a rank `kills` times, and return the steps lost by each kill."""
    finished = []
    for number in range(kills):
        wait_until(lambda number=number: count_events(directory, STARTED) > number, "a start")
        start_step = read_events(directory)[-1]["step"]
        wait_until(
            lambda start_step=start_step: any(line["step"] > start_step for line in read_metrics(directory)), "a step"
        )
        time.sleep(chance.uniform(0, LATEST_SECONDS))
        os.kill(rank_pids(directory)[chance.randrange(2)], signal.SIGKILL)
        wait_until(lambda number=number: count_events(directory, FAILED) > number, "a failure")
        # The remaining rank reports this step.
        failed_at = [event["step"] for event in read_events(directory) if event["kind"] == FAILED][-1]
        finished.append(max(failed_at, read_metrics(directory)[-1]["step"]))
    wait_until(lambda: count_events(directory, STARTED) > kills, "the last start")
    resumed_steps = [event["step"] for event in read_events(directory) if event["kind"] == STARTED][1:]
    # A copy of a step is complete shortly before metrics.jsonl contains the step.
    return [
        max(0, finished_step - start_step) for finished_step, start_step in zip(finished, resumed_steps, strict=True)
    ]


def count_events(directory: Path, kind: str) -> int:
    """Return the number of events of this kind."""
    return sum(event["kind"] == kind for event in read_events(directory))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=20)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="phalanx-copies-") as name:
        folder = Path(name)
        file, directory = run_file(folder), folder / "copies"
        command = [sys.executable, "-m", "phalanx", "train", str(file), "--nproc", "2"]
        with (folder / "log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as launcher:
            try:
                losses = lost_steps(directory, args.kills, random.Random(1))
                last = read_events(directory)[-1]["step"]
                wait_until(lambda: any(line["step"] > last + 50 for line in read_metrics(directory)), "fifty steps")
            finally:
                launcher.send_signal(signal.SIGTERM)
                launcher.wait(timeout=100)
        assert rank_record_file(directory, 0).exists()
        record = read_run(directory).ranks[0]
        copies = median(pause["seconds"] for pause in record.pauses if pause["pause"] == "copy")
        steps = median(sum(line["seconds"].values()) for line in record.steps)
    text = f"""# In-memory checkpoints

| | |
|---|---:|
| ranks killed | {len(losses)} |
| steps lost, maximum | {max(losses)} |
| steps lost, mean | {mean(losses):.2f} |
| time of a step, median | {1e3 * steps:.0f} ms |
| time of a copy, median | {1e3 * copies:.1f} ms |

Target: a rank that is killed at a random step costs at most one step: {"met" if max(losses) <= 1 else "missed"}.

- Two ranks under DDP train a model of 2.1 million parameters in fp32. Each rank copies {12 * 2.1:.0f} MB per step.
  No checkpoint was on disk.
- Written by `python -m benchmarks.copies`.
"""
    print(text)
    write_results(PAGE, text)


if __name__ == "__main__":
    main()

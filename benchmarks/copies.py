"""Copies in memory: what a rank that is killed at a random step costs, and what the copies cost.

    python -m benchmarks.copies       # some minutes; prints the table and writes docs/results/benchmarks/copies.md

Two ranks train with `recovery.in_memory_checkpoint_every = 1` and no checkpoint on the way; twenty times a random one
is killed at a random moment. Steps lost are those that both had finished and that were done again."""

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
"""Until a rank is killed, at most, from the first step of a start."""


def run_file(folder: Path) -> Path:
    """Of a run without an end."""
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
    """Kill a rank so often; the steps that each time were lost."""
    finished = []
    for number in range(kills):
        wait_until(lambda number=number: happened(directory, STARTED) > number, "a start")
        after = read_events(directory)[-1]["step"]
        wait_until(lambda after=after: any(line["step"] > after for line in read_metrics(directory)), "a step")
        time.sleep(chance.uniform(0, LATEST_SECONDS))
        os.kill(rank_pids(directory)[chance.randrange(2)], signal.SIGKILL)
        wait_until(lambda number=number: happened(directory, FAILED) > number, "a failure")
        told = [event["step"] for event in read_events(directory) if event["what"] == FAILED][-1]  # by who was left
        finished.append(max(told, read_metrics(directory)[-1]["step"]))
    wait_until(lambda: happened(directory, STARTED) > kills, "the last start")
    again = [event["step"] for event in read_events(directory) if event["what"] == STARTED][1:]
    # A copy of a step is there a moment before that step is written down.
    return [max(0, before - after) for before, after in zip(finished, again, strict=True)]


def happened(directory: Path, what: str) -> int:
    """How often something did."""
    return sum(event["what"] == what for event in read_events(directory))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=20)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="phalanx-copies-") as name:
        folder = Path(name)
        file, directory = run_file(folder), folder / "copies"
        command = [sys.executable, "-m", "phalanx", "train", str(file), "--nproc", "2"]
        with (folder / "log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as launcher:
            try:
                lost = lost_steps(directory, asked.kills, random.Random(1))
                last = read_events(directory)[-1]["step"]
                wait_until(lambda: any(line["step"] > last + 50 for line in read_metrics(directory)), "fifty steps")
            finally:
                launcher.send_signal(signal.SIGTERM)
                launcher.wait(timeout=100)
        assert rank_record_file(directory, 0).exists()
        record = read_run(directory).ranks[0]
        copies = median(pause["seconds"] for pause in record.pauses if pause["pause"] == "copy")
        steps = median(sum(line["seconds"].values()) for line in record.steps)
    text = f"""# Copies in memory

| | |
|---|---:|
| ranks killed | {len(lost)} |
| steps lost, at most | {max(lost)} |
| mean | {mean(lost):.2f} |
| a step, median | {1e3 * steps:.0f} ms |
| a copy after it, median | {1e3 * copies:.1f} ms |

Target: a rank that is killed at a random step costs at most one: {"met" if max(lost) <= 1 else "missed"}.

- Two ranks under DDP, a model of 2.1 million parameters in fp32: each copies {12 * 2.1:.0f} MB a step.
  Nothing was on disk.
- Written by `python -m benchmarks.copies`.
"""
    print(text)
    PAGE.write_text(text)


if __name__ == "__main__":
    main()

"""Measure the goodput of a run whose ranks are killed repeatedly, and compare it with the planner's formula.

    python -m benchmarks.goodput       # 35 minutes; prints the table and writes docs/results/benchmarks/goodput.md

Two ranks train a small model on the source of the Python library with `phalanx train`. SIGKILL kills a random rank at
exponentially distributed times, also during restarts. The reference is the same run without kills and checkpoints.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.pages import write_results
from phalanx.cost.formulas.reliability import goodput
from phalanx.runs.events import read_events
from phalanx.runs.metrics import METRICS_FILE, read_metrics
from phalanx.runs.step_records import rank_record_file
from phalanx.spec.errors import EXIT_STOPPED
from phalanx.spec.files.load import run_from_table
from phalanx.spec.files.write import to_toml
from phalanx.spec.run import RunSpec
from phalanx.testing.processes import rank_pids, wait_until

PAGE = Path(__file__).parents[1] / "docs" / "results" / "benchmarks" / "goodput.md"
RANKS, LIMIT, END_SECONDS = 2, 0.1, 300
LOOK_SECONDS = 0.05
BEHIND = 5
"""Number of steps after a checkpoint that count as steps during its write."""
LAST_BYTES = 4096
"""Bytes at the end of metrics.jsonl that contain its last line."""
MODEL = {
    "vocab_size": 257,
    "hidden_size": 128,
    "num_layers": 4,
    "num_heads": 4,
    "num_kv_heads": 4,
    "ffn_hidden_size": 512,
    "max_seq_len": 128,
}


def make_run(out: Path, every_seconds: float | None) -> RunSpec:
    """Return a run that would last for days.

    `every_seconds` is its mean time between failures, or None for a run without failures and checkpoints.
    """
    return run_from_table(
        {
            "name": "goodput",
            "output_dir": str(out),
            "model": MODEL,
            "data": {"train": ["stdlib"], "tokenizer": "bytes", "cache": str(out / "cache")},
            "training": {"steps": 10**7, "seq_len": 128, "tokens_per_step": 8 * 128, "precision": "fp32"},
            "optimizer": {"lr_schedule": "none"},
            "evaluation": {"tokens": 1024},
            "checkpoint": {"every": "auto" if every_seconds else 0},
            "recovery": {"max_restarts": 20},
            "cluster": {
                "device": "cpu",
                "nproc_per_node": RANKS,
                "peak_flops": 1e11,
                "failures_per_device_hour": 3600 / every_seconds / RANKS if every_seconds else None,
            },
        }
    )


@dataclass(frozen=True)
class Observations:
    """Observations of a run from outside. Times are those of time.time()."""

    killed: Sequence[float]
    seen: Sequence[tuple[float, int]]
    """Times at which the last recorded step changed, and these steps."""
    ended: float
    """Time of the stop signal."""


def observe_and_kill(directory: Path, seconds: float, every_seconds: float | None, seed: int) -> Observations:
    """Watch a run for `seconds` after its first step, and kill ranks every `every_seconds` on average (None: never)."""
    chance, observed_steps, killed = random.Random(seed), [], []

    def next_one() -> float:
        return chance.expovariate(1 / every_seconds) if every_seconds else math.inf

    with record_steps(directory / METRICS_FILE, observed_steps):
        wait_until(lambda: observed_steps, "a first step")
        end = time.time() + seconds
        next_kill = time.time() + next_one()
        while next_kill < end:
            time.sleep(max(0.0, next_kill - time.time()))
            killed.append(kill_one(directory, chance))
            next_kill += next_one()
        time.sleep(max(0.0, end - time.time()))
        return Observations(killed, list(observed_steps), time.time())


def kill_one(directory: Path, chance: random.Random) -> float:
    """Kill a random rank as soon as one exists; return the time."""
    while True:
        ranks = rank_pids(directory)
        if ranks:
            with suppress(ProcessLookupError):
                os.kill(chance.choice(list(ranks.values())), signal.SIGKILL)
                return time.time()
        time.sleep(LOOK_SECONDS)


@contextmanager
def record_steps(file: Path, observed_steps: list[tuple[float, int]]) -> Iterator[None]:
    """Append the time of each new step in `file` to `observed_steps` while the context is open."""
    stopped = threading.Event()

    def look() -> None:
        while not stopped.wait(LOOK_SECONDS):
            step = last_recorded_step(file)
            if step is not None and (not observed_steps or observed_steps[-1][1] != step):
                observed_steps.append((time.time(), step))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()


def last_recorded_step(file: Path) -> int | None:
    """Return the step of the last complete line."""
    try:
        with file.open("rb") as stream:
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - LAST_BYTES))
            lines = stream.read().split(b"\n")[:-1]
    except OSError:
        return None
    return int(json.loads(lines[-1])["step"]) if lines else None


@dataclass(frozen=True)
class Failure:
    """Failure and its consequences."""

    detect_seconds: float
    """Time from the kill to the event of the launcher."""
    resume_seconds: float | None
    """Time from the kill to the end of the next step; None if another failure occurred before this step."""
    steps_lost: int


def read_failures(observations: Observations, events: Sequence[Mapping[str, Any]]) -> list[Failure]:
    """Return the failures in the events of a run."""
    failure_events = [event for event in events if event["kind"] == "failed"]
    ends = [*(float(event["time"]) for event in failure_events[1:]), observations.ended]
    failures, previous = [], 0.0
    for event, end in zip(failure_events, ends, strict=True):
        detected = float(event["time"])
        kill = min(moment for moment in observations.killed if previous < moment <= detected)
        previous = detected
        began = [e for e in events if e["kind"] == "started" and detected < e["time"] < end]
        steps = [
            moment
            for moment, step in observations.seen
            if began and began[-1]["time"] < moment < end and step > began[-1]["step"]
        ]
        resumed_step = next(
            (e["step"] for e in events if e["kind"] == "started" and e["time"] > detected), event["step"]
        )
        failures.append(Failure(detected - kill, steps[0] - kill if steps else None, event["step"] - resumed_step))
    return failures


@dataclass(frozen=True)
class Measurements:
    """Measurements of a run, named as the inputs of the planner's formula."""

    wall_seconds: float
    steps: int
    """Steps in the final model."""
    undisturbed_seconds: float
    """Step interval of the run without kills and checkpoints."""
    median_step_seconds: float
    interval_seconds: float
    """Work between two checkpoints."""
    wait_seconds: float
    """Pause of training for a checkpoint."""
    slowed_seconds: float
    """Total slowdown of the steps after a checkpoint, during which it is written."""
    failures: Sequence[Failure]

    @property
    def goodput(self) -> float:
        return self.steps * self.undisturbed_seconds / self.wall_seconds

    @property
    def mtbf_seconds(self) -> float:
        return self.wall_seconds / len(self.failures)

    @property
    def restart_seconds(self) -> float:
        """Mean without restarts that another failure interrupted, which the planner's formula counts separately."""
        return mean(failure.resume_seconds for failure in self.failures if failure.resume_seconds is not None)

    @property
    def write_seconds(self) -> float:
        """Cost of a checkpoint for training."""
        return self.wait_seconds + self.slowed_seconds

    @property
    def predicted(self) -> float:
        return self.formula(self.write_seconds)

    def formula(self, write_seconds: float) -> float:
        """Return the goodput of the planner's formula for this cost of a checkpoint."""
        return goodput(self.interval_seconds, write_seconds, self.mtbf_seconds, self.restart_seconds)


def measure_run(directory: Path, observations: Observations, undisturbed_seconds: float) -> Measurements:
    """Compute the measurements of a run from its files."""
    events = read_events(directory)
    began = float(next(event["time"] for event in events if event["kind"] == "started"))
    seconds = [record["step_seconds"] for record in read_metrics(directory) if "loss" in record]
    lines = [json.loads(line) for line in rank_record_file(directory, 0).read_text().splitlines()]
    saves = [line for line in lines if "pause" in line or "format" in line]
    between = [b["step"] - a["step"] for a, b in pairwise(saves) if "pause" in a and "pause" in b]
    return Measurements(
        wall_seconds=observations.ended - began,
        steps=observations.seen[-1][1],
        undisturbed_seconds=undisturbed_seconds,
        median_step_seconds=median(seconds),
        interval_seconds=median(between) * undisturbed_seconds,
        wait_seconds=mean(line["seconds"] for line in saves if "pause" in line),
        slowed_seconds=slowed_seconds(lines),
        failures=read_failures(observations, events),
    )


def slowed_seconds(lines: Sequence[Mapping[str, Any]]) -> float:
    """Return the total slowdown of the first steps after a checkpoint, compared with the later steps, on average."""
    steps_after_save: list[list[float]] = []
    for line in lines:
        if "pause" in line:
            steps_after_save.append([])
        elif "seconds" in line and steps_after_save:
            steps_after_save[-1].append(sum(line["seconds"].values()))
    steps_during_write = [steps[:BEHIND] for steps in steps_after_save if len(steps) >= 2 * BEHIND]
    usual = mean(seconds for steps in steps_after_save if len(steps) >= 2 * BEHIND for seconds in steps[BEHIND:])
    return max(0.0, mean(sum(steps) - BEHIND * usual for steps in steps_during_write))


@contextmanager
def run_with_kills(seconds: float, every_seconds: float | None, seed: int) -> Iterator[tuple[Path, Observations]]:
    """Train a run and kill ranks; yield the run directory and the observations."""
    with tempfile.TemporaryDirectory(prefix="phalanx-goodput-") as scratch:
        folder = Path(scratch)
        run = make_run(folder, every_seconds)
        file, directory = folder / "run.toml", folder / run.name
        file.write_text(to_toml(run))
        with (folder / "log").open("w+") as log:
            train = subprocess.Popen([sys.executable, "-m", "phalanx", "train", str(file)], stdout=log, stderr=log)
            try:
                observations = observe_and_kill(directory, seconds, every_seconds, seed)
                train.send_signal(signal.SIGTERM)
                code = train.wait(timeout=END_SECONDS)
            finally:
                train.kill()
                wait_until(lambda: not rank_pids(directory), "end of all ranks")
                print((folder / "log").read_text(), file=sys.stderr)
        assert code == EXIT_STOPPED, code
        yield directory, observations


def undisturbed_step_seconds(seconds: float) -> float:
    """Return the step interval of a run without kills and checkpoints, measured for `seconds`."""
    with run_with_kills(seconds, None, 0) as (_, observations):
        (first, before), (last, after) = observations.seen[0], observations.seen[-1]
        return (last - first) / (after - before)


def page(measured: Measurements, every_seconds: float) -> str:
    """Return the page of the benchmark."""
    failures, off = measured.failures, measured.goodput / measured.predicted - 1
    by_median = measured.goodput * measured.median_step_seconds / measured.undisturbed_seconds
    resumed = [failure for failure in failures if failure.resume_seconds is not None]
    rows = {
        "goodput, measured": f"{measured.goodput:.1%}",
        "goodput, predicted by the planner's formula": f"{measured.predicted:.1%}",
        "measured / predicted": f"{1 + off:.3f}",
        "goodput, measured with the median step": f"{by_median:.1%}",
        "wall-clock time": f"{measured.wall_seconds / 60:.1f} min",
        "steps in the final model": f"{measured.steps:,}",
        "step interval of the undisturbed run": f"{measured.undisturbed_seconds * 1e3:.1f} ms",
        "step time, median": f"{measured.median_step_seconds * 1e3:.1f} ms",
        "failures": f"{len(failures)}, {len(failures) - len(resumed)} of them before the first step after the "
        "previous failure",
        "mean time between failures": f"{measured.mtbf_seconds:.0f} s",
        "work between checkpoints, median": f"{measured.interval_seconds:.1f} s",
        "pause of training for a checkpoint, mean": f"{measured.wait_seconds * 1e3:.0f} ms",
        "slowdown of the steps during a checkpoint write, mean": f"{measured.slowed_seconds * 1e3:.0f} ms",
        "time from a kill to its event, median": f"{median(failure.detect_seconds for failure in failures):.1f} s",
        "time from a kill to the next step, median": f"{median(e.resume_seconds or 0 for e in resumed):.1f} s",
        "time from a kill to the next step, mean; restart time of the formula": f"{measured.restart_seconds:.1f} s",
        "steps lost per failure, median (mean)": f"{median(failure.steps_lost for failure in failures):.0f} "
        f"({mean(failure.steps_lost for failure in failures):.0f})",
    }
    lines = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    return f"""# Goodput of a run whose ranks are killed

| | |
|---|---:|
{lines}

Target: the measured goodput is within {LIMIT:.0%} of the formula's. \
Deviation: {off:+.1%} ({"met" if abs(off) <= LIMIT else "missed"}).

- Two ranks on two cores train a model of {MODEL["num_layers"]} layers and width {MODEL["hidden_size"]} \
with `checkpoint.every = "auto"`.
  Ranks are killed at exponentially distributed times with a mean of {every_seconds:.0f} s, also during restarts.
  `cluster.failures_per_device_hour` has the corresponding rate.
- Measured goodput = steps in the final model * step interval of the undisturbed run / time from the first start to the
  stop signal. The undisturbed run has no kills and no checkpoints, and was measured in the same hour.
- The formula is `phalanx.cost.formulas.reliability.goodput`. Its inputs are from this table: work between checkpoints,
  sum of both checkpoint costs, mean time between failures and restart time. The slowdown compares
  the first {BEHIND} steps after a checkpoint with the later steps.
- The goodput with the median step uses the median step time of this run instead of the undisturbed step interval. It
  counts every slower step as a loss.
- Written by `python -m benchmarks.goodput`.
"""


def main() -> None:
    """Measure, print the table and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--alone", type=float, default=5.0, help="minutes of the run without kills and checkpoints")
    parser.add_argument("--every", type=float, default=90.0, help="mean seconds between failures")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    step = undisturbed_step_seconds(60 * args.alone)
    with run_with_kills(60 * args.minutes, args.every, args.seed) as (directory, observations):
        measured = measure_run(directory, observations, step)
    print(measured, file=sys.stderr)
    text = page(measured, args.every)
    print(text)
    write_results(PAGE, text)


if __name__ == "__main__":
    main()

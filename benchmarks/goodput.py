"""How much of its time a run keeps whose ranks are killed again and again, beside what the planner says of that.

    python -m benchmarks.goodput       # 35 minutes; prints the table and writes docs/results/benchmarks/goodput.md

Two ranks train a small model on the Python library's source by `phalanx train`. A rank, drawn by chance, is killed by
SIGKILL at exponentially distributed times, at any time: while the run starts again, too. The same run, neither killed
nor saved, is the measure of what is kept.
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
"""So many steps after a save are taken for those behind which it is written."""
LAST_BYTES = 4096
"""Of metrics.jsonl, in which its last line is."""
MODEL = {
    "vocab_size": 257,
    "hidden_size": 128,
    "num_layers": 4,
    "num_heads": 4,
    "num_kv_heads": 4,
    "ffn_hidden_size": 512,
    "max_seq_len": 128,
}


def described(out: Path, every_seconds: float | None) -> RunSpec:
    """A run that would last for days. It is told how often ranks fail, as the planner is; None: never, and it saves
    nothing."""
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
class Watched:
    """What was seen of a run from outside. Times are those of time.time()."""

    killed: Sequence[float]
    seen: Sequence[tuple[float, int]]
    """When the last step that is written down became another, and which."""
    ended: float
    """When the run was told to end."""


def watched(directory: Path, seconds: float, every_seconds: float | None, seed: int) -> Watched:
    """Kill ranks of a run for so long after its first step (None: never), and watch."""
    chance, seen, killed = random.Random(seed), [], []

    def next_one() -> float:
        return chance.expovariate(1 / every_seconds) if every_seconds else math.inf

    with watching(directory / METRICS_FILE, seen):
        wait_until(lambda: seen, "a first step")
        end = time.time() + seconds
        at = time.time() + next_one()
        while at < end:
            time.sleep(max(0.0, at - time.time()))
            killed.append(kill_one(directory, chance))
            at += next_one()
        time.sleep(max(0.0, end - time.time()))
        return Watched(killed, list(seen), time.time())


def kill_one(directory: Path, chance: random.Random) -> float:
    """Kill a rank, as soon as there is one; says when."""
    while True:
        ranks = rank_pids(directory)
        if ranks:
            with suppress(ProcessLookupError):
                os.kill(chance.choice(list(ranks.values())), signal.SIGKILL)
                return time.time()
        time.sleep(LOOK_SECONDS)


@contextmanager
def watching(file: Path, seen: list[tuple[float, int]]) -> Iterator[None]:
    """Meanwhile, when which step was the last that is written down."""
    over = threading.Event()

    def look() -> None:
        while not over.wait(LOOK_SECONDS):
            step = last_written(file)
            if step is not None and (not seen or seen[-1][1] != step):
                seen.append((time.time(), step))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def last_written(file: Path) -> int | None:
    """The step of the last whole line."""
    try:
        with file.open("rb") as opened:
            opened.seek(max(0, opened.seek(0, os.SEEK_END) - LAST_BYTES))
            lines = opened.read().split(b"\n")[:-1]
    except OSError:
        return None
    return int(json.loads(lines[-1])["step"]) if lines else None


@dataclass(frozen=True)
class Failure:
    """One, and what came of it."""

    detect_seconds: float
    """From the kill until the launcher has noted it."""
    resume_seconds: float | None
    """From the kill to the end of the first step after it; None where another failure came before that."""
    steps_lost: int


def failures_of(watched: Watched, events: Sequence[Mapping[str, Any]]) -> list[Failure]:
    """Those of a run, by its events."""
    failed = [event for event in events if event["what"] == "failed"]
    ends = [*(float(event["time"]) for event in failed[1:]), watched.ended]
    found, since = [], 0.0
    for event, end in zip(failed, ends, strict=True):
        noted = float(event["time"])
        kill = min(at for at in watched.killed if since < at <= noted)
        since = noted
        began = [e for e in events if e["what"] == "started" and noted < e["time"] < end]
        steps = [at for at, step in watched.seen if began and began[-1]["time"] < at < end and step > began[-1]["step"]]
        again = next((e["step"] for e in events if e["what"] == "started" and e["time"] > noted), event["step"])
        found.append(Failure(noted - kill, steps[0] - kill if steps else None, event["step"] - again))
    return found


@dataclass(frozen=True)
class Measured:
    """A run, in the planner's words."""

    wall_seconds: float
    steps: int
    """That ended up in the model."""
    undisturbed_seconds: float
    """From one step to the next, of the run that is neither killed nor saved."""
    median_step_seconds: float
    interval_seconds: float
    """Of work between two saves."""
    wait_seconds: float
    """For which a save keeps training waiting."""
    slowed_seconds: float
    """By how much the steps after a save are longer than the median together: it is written behind them."""
    failures: Sequence[Failure]

    @property
    def goodput(self) -> float:
        return self.steps * self.undisturbed_seconds / self.wall_seconds

    @property
    def mtbf_seconds(self) -> float:
        return self.wall_seconds / len(self.failures)

    @property
    def restart_seconds(self) -> float:
        """Without those that another failure cut short, which the planner's formula counts by itself."""
        return mean(each.resume_seconds for each in self.failures if each.resume_seconds is not None)

    @property
    def write_seconds(self) -> float:
        """What a save costs training."""
        return self.wait_seconds + self.slowed_seconds

    @property
    def predicted(self) -> float:
        return self.formula(self.write_seconds)

    def formula(self, write_seconds: float) -> float:
        """The planner's, where a save costs so much."""
        return goodput(self.interval_seconds, write_seconds, self.mtbf_seconds, self.restart_seconds)


def measured(directory: Path, watched: Watched, undisturbed_seconds: float) -> Measured:
    """What a run came to, from what it wrote down."""
    events = read_events(directory)
    began = float(next(event["time"] for event in events if event["what"] == "started"))
    seconds = [record["step_seconds"] for record in read_metrics(directory) if "loss" in record]
    lines = [json.loads(line) for line in rank_record_file(directory, 0).read_text().splitlines()]
    saves = [line for line in lines if "pause" in line or "format" in line]
    between = [b["step"] - a["step"] for a, b in pairwise(saves) if "pause" in a and "pause" in b]
    return Measured(
        wall_seconds=watched.ended - began,
        steps=watched.seen[-1][1],
        undisturbed_seconds=undisturbed_seconds,
        median_step_seconds=median(seconds),
        interval_seconds=median(between) * undisturbed_seconds,
        wait_seconds=mean(line["seconds"] for line in saves if "pause" in line),
        slowed_seconds=slowed_seconds(lines),
        failures=failures_of(watched, events),
    )


def slowed_seconds(lines: Sequence[Mapping[str, Any]]) -> float:
    """By how much the first steps after a save, on average, are longer than those before the next one, together."""
    after: list[list[float]] = []
    for line in lines:
        if "pause" in line:
            after.append([])
        elif "seconds" in line and after:
            after[-1].append(sum(line["seconds"].values()))
    first = [steps[:BEHIND] for steps in after if len(steps) >= 2 * BEHIND]
    usual = mean(second for steps in after if len(steps) >= 2 * BEHIND for second in steps[BEHIND:])
    return max(0.0, mean(sum(steps) - BEHIND * usual for steps in first))


@contextmanager
def run_through(seconds: float, every_seconds: float | None, seed: int) -> Iterator[tuple[Path, Watched]]:
    """Train, kill, and give the run directory with what was seen."""
    with tempfile.TemporaryDirectory(prefix="phalanx-goodput-") as scratch:
        folder = Path(scratch)
        run = described(folder, every_seconds)
        file, directory = folder / "run.toml", folder / run.name
        file.write_text(to_toml(run))
        with (folder / "said").open("w+") as said:
            train = subprocess.Popen([sys.executable, "-m", "phalanx", "train", str(file)], stdout=said, stderr=said)
            try:
                found = watched(directory, seconds, every_seconds, seed)
                train.send_signal(signal.SIGTERM)
                code = train.wait(timeout=END_SECONDS)
            finally:
                train.kill()
                wait_until(lambda: not rank_pids(directory), "no rank is left")
                print((folder / "said").read_text(), file=sys.stderr)
        assert code == EXIT_STOPPED, code
        yield directory, found


def undisturbed(seconds: float) -> float:
    """Seconds from one step to the next, of a run that is neither killed nor saved, for so long."""
    with run_through(seconds, None, 0) as (_, found):
        (first, before), (last, after) = found.seen[0], found.seen[-1]
        return (last - first) / (after - before)


def page(found: Measured, every_seconds: float) -> str:
    """What is written to docs/."""
    failures, off = found.failures, found.goodput / found.predicted - 1
    by_median = found.goodput * found.median_step_seconds / found.undisturbed_seconds
    whole = [each for each in failures if each.resume_seconds is not None]
    rows = {
        "goodput, measured": f"{found.goodput:.1%}",
        "goodput, as the planner's formula has it": f"{found.predicted:.1%}",
        "measured / formula": f"{1 + off:.3f}",
        "goodput, measured, by the median step": f"{by_median:.1%}",
        "wall-clock time": f"{found.wall_seconds / 60:.1f} min",
        "steps in the model": f"{found.steps:,}",
        "from step to step, undisturbed": f"{found.undisturbed_seconds * 1e3:.1f} ms",
        "step, median": f"{found.median_step_seconds * 1e3:.1f} ms",
        "failures": f"{len(failures)}, {len(failures) - len(whole)} of them before the first step after another",
        "mean time between failures": f"{found.mtbf_seconds:.0f} s",
        "work between saves, median": f"{found.interval_seconds:.1f} s",
        "a save keeps training waiting, mean": f"{found.wait_seconds * 1e3:.0f} ms",
        "and makes the steps behind which it is written longer, mean": f"{found.slowed_seconds * 1e3:.0f} ms",
        "from a kill to its note, median": f"{median(each.detect_seconds for each in failures):.1f} s",
        "from a kill to the first step after it, median": f"{median(e.resume_seconds or 0 for e in whole):.1f} s",
        "the same, mean: the formula's restart": f"{found.restart_seconds:.1f} s",
        "steps lost by a failure, median (mean)": f"{median(each.steps_lost for each in failures):.0f} "
        f"({mean(each.steps_lost for each in failures):.0f})",
    }
    lines = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    return f"""# Goodput of a run whose ranks are killed

| | |
|---|---:|
{lines}

Target: a measured goodput within {LIMIT:.0%} of the formula's: {off:+.1%} ({"met" if abs(off) <= LIMIT else "missed"}).

- Two ranks on two cores, a model of {MODEL["num_layers"]} layers and width {MODEL["hidden_size"]}; \
`checkpoint.every = "auto"`
  and `cluster.failures_per_device_hour` as often as ranks are killed: at exponentially distributed times with a mean of
  {every_seconds:.0f} s, whatever the run is doing.
- Measured: steps in the model / time from the first start until the run is told to stop, beside the same of a run that
  is neither killed nor saved, in the same hour. The formula is `phalanx.cost.formulas.reliability.goodput`, \
given the interval,
  both costs of a save together, the mean time between failures and the restart of this table. (Longer: the first
  {BEHIND} steps after a save beside those after them.)
- By the median step: this run's own, as if all steps could take as long, whatever else makes some longer.
- Written by `python -m benchmarks.goodput`.
"""


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--alone", type=float, default=5.0, help="minutes of the run that is neither killed nor saved")
    parser.add_argument("--every", type=float, default=90.0, help="mean seconds between failures")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    step = undisturbed(60 * asked.alone)
    with run_through(60 * asked.minutes, asked.every, asked.seed) as (directory, seen):
        found = measured(directory, seen, step)
    print(found, file=sys.stderr)
    text = page(found, asked.every)
    print(text)
    PAGE.write_text(text)


if __name__ == "__main__":
    main()

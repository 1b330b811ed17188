"""Break a run of `phalanx train` on purpose, and compare it with a run that never failed."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.goodput import record_steps
from phalanx.data.loader import prefetch
from phalanx.data.prepare import prepare
from phalanx.runs.checkpoints import checkpoints, step_of
from phalanx.runs.events import ROLLED_BACK, read_events
from phalanx.runs.metrics import METRICS_FILE, read_metrics
from phalanx.spec.files.load import load_run, run_from_table
from phalanx.spec.files.write import to_toml
from phalanx.spec.run import RunSpec
from phalanx.testing.processes import rank_pids, wait_until
from phalanx.train.trainer import Trainer
from phalanx.train.training_data import open_training_data

MODEL = {
    "vocab_size": 257,
    "hidden_size": 64,
    "num_layers": 4,
    "num_heads": 4,
    "num_kv_heads": 4,
    "ffn_hidden_size": 256,
    "max_seq_len": 64,
}
SEQUENCES = 16
"""Sequences per step."""
EVERY, TIMEOUT_SECONDS, LAST_CALL_SECONDS, BAD_STEPS = 20, 5, 3, 3


def make_run(out: Path, cache: Path) -> RunSpec:
    """Return a run without an end."""
    return run_from_table(
        {
            "name": "faults",
            "output_dir": str(out),
            "model": MODEL,
            "data": {"train": ["stdlib"], "tokenizer": "bytes", "cache": str(cache)},
            "training": {
                "steps": 10**6,
                "seq_len": 64,
                "tokens_per_step": SEQUENCES * 64,
                "precision": "fp64",
                "collective_timeout_seconds": TIMEOUT_SECONDS,
                "max_nonfinite_steps": BAD_STEPS,
            },
            "optimizer": {"lr_schedule": "none"},
            "evaluation": {"tokens": 1024},
            "checkpoint": {"every": EVERY},
            "recovery": {"last_call_timeout_seconds": LAST_CALL_SECONDS, "max_rollbacks": 1},
            "cluster": {"device": "cpu", "peak_flops": 1e11, "memory_bytes": 10**10},
        }
    )


@dataclass
class FaultResult:
    """Fault and its consequences. Seconds count from the fault; None if ranks did not stop."""

    fault: str
    detect_seconds: float | None
    resume_seconds: float | None
    steps_lost: int
    continues_with: str
    loss_difference: float = field(default=float("nan"))
    """Largest relative difference of a loss from that of one process that never fails."""
    same_bits: bool | None = None
    """True if all losses equal those of a run that never fails; None if the number of ranks changed."""


class RunUnderTest:
    """Run that a benchmark breaks: its launchers and its observed progress."""

    def __init__(self, file: Path, directory: Path) -> None:
        self.file, self.directory = file, directory
        self.launchers: dict[str, subprocess.Popen[bytes]] = {}
        self.seen: list[tuple[float, int]] = []
        """Times at which the last recorded step changed, and these steps."""

    def start(self, name: str, command: Sequence[str]) -> None:
        """Start or restart a launcher."""
        with (self.file.parent / f"{name}.log").open("a") as log:
            self.launchers[name] = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def starts(self) -> list[Any]:
        return [event for event in read_events(self.directory) if event["kind"] == "started"]

    def wait_for_steps(self, num_starts: int, ranks: int, steps: int = 1) -> float:
        """Wait until a new start with `ranks` ranks has finished `steps` steps; return the time of its first step."""
        wait_until(lambda: len(self.starts()) > num_starts and self.starts()[-1]["ranks"] == ranks, f"{ranks} ranks")
        start, start_step = self.starts()[-1]["time"], self.starts()[-1]["step"]
        wait_until(
            lambda: any(observed_at > start and step >= start_step + steps for observed_at, step in self.seen), "steps"
        )
        return next(observed_at for observed_at, step in self.seen if observed_at > start and step > start_step)

    def measure_fault(
        self, fault: str, strike: Callable[[], object], ranks: int = 2, react: Callable[[], object] | None = None
    ) -> FaultResult:
        """Strike after a checkpoint, and measure how the run continues with `ranks` ranks.

        `react` is the reaction of a user or a scheduler.
        """
        self.wait_between_saves()
        num_starts, pids = len(self.starts()), set(rank_pids(self.directory).values())
        fault_time = time.time()
        strike()
        wait_until(lambda: not any(map(_is_alive, pids)), f"{fault}: end of the ranks")
        detected = time.time()
        if react is not None:
            react()
        resumed = self.wait_for_steps(num_starts, ranks)
        event = self.starts()[-1]
        start, end = (float(self.starts()[number]["time"]) for number in (num_starts - 1, num_starts))
        done = max(step for observed_at, step in self.seen if start < observed_at < end)
        return FaultResult(
            fault, detected - fault_time, resumed - fault_time, done - event["step"], f"{ranks} rank{'s' * (ranks > 1)}"
        )

    def wait_between_saves(self) -> None:
        """Wait until this start has saved later steps than earlier starts, and is halfway to a checkpoint."""
        start, folder = self.starts()[-1]["time"], self.directory / "checkpoints"
        step_before_start = max((step for observed_at, step in self.seen if observed_at < start), default=0)
        wait_until(
            lambda: any(step_of(checkpoint) > step_before_start for checkpoint in checkpoints(folder)), "a checkpoint"
        )
        step_at_save, middle_steps = self.seen[-1][1], range(EVERY // 2 - 2, EVERY // 2 + 3)
        wait_until(
            lambda: self.seen[-1][1] > step_at_save and self.seen[-1][1] % EVERY in middle_steps, "halfway to the next"
        )

    def end(self) -> None:
        """Stop the launchers."""
        for launcher in self.launchers.values():
            if launcher.poll() is None:
                launcher.terminate()
        wait_until(
            lambda: all(launcher.poll() is not None for launcher in self.launchers.values()), "end of the launchers"
        )


def _is_alive(pid: int) -> bool:
    """Return whether a process runs; False for a zombie."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


@contextmanager
def breakable_run(folder: Path, out: Path | None = None, cache: Path | None = None) -> Iterator[RunUnderTest]:
    """Yield a run to start and to break, whose directory is created in `out`; kill its processes at the end."""
    folder.mkdir()
    file = folder / "run.toml"
    run = make_run(out or folder, cache or folder.parent / "cache")
    file.write_text(to_toml(run))
    prepare(run.data)
    run_under_test = RunUnderTest(file, Path(run.output_dir) / run.name)
    try:
        with record_steps(run_under_test.directory / METRICS_FILE, run_under_test.seen):
            yield run_under_test
    except AssertionError:
        for log in folder.glob("*.log"):
            print(log.name, log.read_text(), sep="\n", file=sys.stderr)
        raise
    finally:
        for launcher in run_under_test.launchers.values():
            launcher.kill()
            launcher.wait()
        wait_until(lambda: not rank_pids(run_under_test.directory), "end of all ranks")


def read_losses(run: RunUnderTest) -> list[float]:
    """Return the loss of each step."""
    return [record["loss"] for record in read_metrics(run.directory) if "loss" in record]


def has_same_bits(run: RunUnderTest, command: Callable[[RunUnderTest], Sequence[str]]) -> bool:
    """Return whether losses equal, bit by bit, those of a run that starts with `command` and never fails."""
    losses = read_losses(run)
    with breakable_run(run.file.parent / "unbroken", cache=run.file.parents[1] / "cache") as reference:
        reference.start("unbroken", command(reference))
        wait_until(lambda: bool(reference.seen) and reference.seen[-1][1] >= len(losses), "the same number of steps")
        reference.end()
        assert len(reference.starts()) == 1, "the reference run failed"
        return read_losses(reference)[: len(losses)] == losses


def max_loss_difference(run: RunUnderTest) -> float:
    """Return the largest relative difference of a loss from one process that never fails and skips the same text."""
    recorded = read_losses(run)
    run_spec = load_run(run.file)
    trainer = Trainer(
        run_spec, open_training_data(run_spec, prepare(run_spec.data)), run.file.parent / "one", torch.device("cpu")
    )
    rollbacks = {event["to"]: event["after"] for event in read_events(run.directory) if event["kind"] == ROLLED_BACK}
    losses: list[float] = []
    for end in (*rollbacks, len(recorded)):
        batches = prefetch(trainer.loader, trainer.step, end)
        losses += [trainer.train_step(batches)["loss"] for _ in range(trainer.step, end)]
        batches.close()
        if end in rollbacks:
            trainer.loader.skip_steps(rollbacks[end] - end)
    return max(abs(a - b) / b for a, b in zip(recorded, losses, strict=True))

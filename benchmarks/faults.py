"""What breaks a run, how soon that is noticed, how soon it trains again, and what is lost.

    python -m benchmarks.faults       # ten minutes; prints the table and writes docs/benchmarks/faults.md

Real runs of `phalanx train`: two ranks on one machine, or one rank on each of two hosts (network namespaces of this
machine, which takes root). Each is broken on purpose while it trains, and held against one process that never failed.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.goodput import watching
from phalanx.data.loader import prefetch
from phalanx.data.prepare import prepare
from phalanx.measure.events import ROLLED_BACK, read_events
from phalanx.spec.load import build_run, load_run
from phalanx.spec.run import RunSpec
from phalanx.testing.hosts import star
from phalanx.testing.runs import ranks_of, until
from phalanx.train.corpus import open_corpus
from phalanx.train.launch import leave
from phalanx.train.manifest import checkpoints, step_of
from phalanx.train.metrics import METRICS_FILE, read_metrics
from phalanx.train.setup import STOPPED, to_toml
from phalanx.train.trainer import Trainer
from phalanx.train.worker import work

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks" / "faults.md"
NODES, PORT = ("first", "second"), 29_400
MODEL = {"vocab": 257, "width": 64, "layers": 4, "heads": 4, "kv_heads": 4, "ffn": 256, "context": 64}
EVERY, TIMEOUT_SECONDS, LAST_CALL_SECONDS, BAD_STEPS = 20, 5, 3, 3
SAME = 1e-10
"""Relative difference of losses, in fp64, of ranks that sum in another order."""
NAN_STEPS = range(50, 53)
"""Whose gradients are not finite, where that is the fault."""


def described(out: Path) -> RunSpec:
    """A run without an end."""
    return build_run(
        {
            "name": "faults",
            "out": str(out),
            "model": MODEL,
            "data": {"train": ["stdlib"], "tokenizer": "bytes", "cache": str(out.parent / "cache")},
            "training": {
                "steps": 10**6, "sequence": 64, "tokens_per_step": 16 * 64, "precision": "fp64",
                "timeout_seconds": TIMEOUT_SECONDS, "max_bad_steps": BAD_STEPS,
            },
            "optimizer": {"decay": "none"},
            "evaluation": {"tokens": 1024},
            "checkpoint": {"every": EVERY},
            "recovery": {"last_call_seconds": LAST_CALL_SECONDS, "rollbacks": 1},
            "cluster": {"device": "cpu", "peak_flops": 1e11, "memory_bytes": 10**10},
        }
    )  # fmt: skip


@dataclass
class Broken:
    """A fault, and what came of it. Seconds count from the fault."""

    fault: str
    detect_seconds: float
    resume_seconds: float
    steps_lost: int
    goes_on: str
    differs: float = field(default=float("nan"))
    """The largest relative difference of a loss to the run that never failed."""


class Running:
    """A run under way: its launchers, and what is seen of it."""

    def __init__(self, file: Path) -> None:
        self.file, self.directory = file, file.parent / "faults"
        self.launchers: dict[str, subprocess.Popen[bytes]] = {}
        self.seen: list[tuple[float, int]] = []
        """When which step was the last that is written down."""

    def start(self, name: str, command: Sequence[str]) -> None:
        """A launcher, or one again."""
        with (self.file.parent / f"{name}.log").open("a") as log:
            self.launchers[name] = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def began(self) -> list[Any]:
        return [event for event in read_events(self.directory) if event["what"] == "began"]

    def trains(self, begun: int, ranks: int, steps: int = 1) -> float:
        """Wait until the last start, which is not one of so many before, has done some steps; when it did the first."""
        until(lambda: len(self.began()) > begun and self.began()[-1]["ranks"] == ranks, f"{ranks} ranks")
        at, after = self.began()[-1]["time"], self.began()[-1]["step"]
        until(lambda: any(when > at and step >= after + steps for when, step in self.seen), "steps")
        return next(when for when, step in self.seen if when > at and step > after)

    def broken(
        self, fault: str, strike: Callable[[], object], ranks: int = 2, again: Callable[[], object] | None = None
    ) -> Broken:
        """Strike, once there is something to lose; `again` is what a user or a scheduler does then. How soon and how
        well the run goes on with so many ranks."""
        self.between_saves()
        begun, before = len(self.began()), set(ranks_of(self.directory).values())
        at = time.time()
        strike()
        until(lambda: not any(map(_lives, before)), f"{fault}: ranks have ended")
        detected = time.time()
        if again is not None:
            again()
        resumed = self.trains(begun, ranks)
        event = self.began()[-1]
        since, until_then = (float(self.began()[number]["time"]) for number in (begun - 1, begun))
        done = max(step for when, step in self.seen if since < when < until_then)
        return Broken(fault, detected - at, resumed - at, done - event["step"], f"{ranks} rank{'s' * (ranks > 1)}")

    def between_saves(self) -> None:
        """Wait until this start has saved something and is half way to its next checkpoint."""
        begun, folder = self.began()[-1]["step"], self.directory / "checkpoints"
        until(lambda: any(step_of(each) > begun for each in checkpoints(folder)), "a checkpoint")
        first, half = self.seen[-1][1], range(EVERY // 2 - 2, EVERY // 2 + 3)
        until(lambda: self.seen[-1][1] > first and self.seen[-1][1] % EVERY in half, "half way to the next")


def _lives(pid: int) -> bool:
    """Also of one that has ended where nobody has taken note yet."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


@contextmanager
def running(folder: Path) -> Iterator[Running]:
    """A run to start and to break. None of its processes is left."""
    folder.mkdir()
    file = folder / "run.toml"
    run = described(folder)
    file.write_text(to_toml(run))
    prepare(run.data)
    found = Running(file)
    try:
        with watching(found.directory / METRICS_FILE, found.seen):
            yield found
    except AssertionError:
        for log in folder.glob("*.log"):
            print(log.name, log.read_text(), sep="\n", file=sys.stderr)
        raise
    finally:
        for launcher in found.launchers.values():
            launcher.kill()
            launcher.wait()
        until(lambda: not ranks_of(found.directory), "no rank is left")


def differs(run: Running) -> float:
    """The largest relative difference of a loss to one process's that never fails, and passes over the same text."""
    learned = [record["loss"] for record in read_metrics(run.directory) if "loss" in record]
    described = load_run(run.file)
    one = Trainer(
        described, open_corpus(described, prepare(described.data)), run.file.parent / "one", torch.device("cpu")
    )
    back = {event["to"]: event["after"] for event in read_events(run.directory) if event["what"] == ROLLED_BACK}
    losses: list[float] = []
    for end in (*back, len(learned)):
        batches = prefetch(one.loader, one.step, end)
        losses += [one.train_step(batches)["loss"] for _ in range(one.step, end)]
        batches.close()
        if end in back:
            one.loader.pass_over(back[end] - end)
    return max(abs(a - b) / b for a, b in zip(learned, losses, strict=True))


def on_one_machine(folder: Path) -> Iterator[Broken]:
    """Two ranks, and a fault after the other."""
    with running(folder) as run:
        command = [sys.executable, "-m", "phalanx", "train", str(run.file), "--nproc", "2", "--resume"]

        def start() -> None:
            run.start("one", command)

        def rank(sent: signal.Signals) -> Callable[[], None]:
            return lambda: os.kill(ranks_of(run.directory)[1], sent)

        def ended() -> None:
            code = run.launchers["one"].wait(timeout=60)
            assert code in (STOPPED, -signal.SIGKILL), code
            start()

        start()
        run.trains(0, 2, EVERY)
        one, slow = run.launchers, f"a rank stands still (SIGSTOP), and collectives may take {TIMEOUT_SECONDS} s"
        found = [
            run.broken("a rank is killed (SIGKILL)", rank(signal.SIGKILL)),
            run.broken(slow, rank(signal.SIGSTOP)),
            run.broken("the run is stopped (SIGTERM), and started again", lambda: one["one"].terminate(), again=ended),
            run.broken("the launcher is killed, and started again", lambda: one["one"].kill(), again=ended),
        ]
        end_in_order(run)
        off = differs(run)
    for each in found:
        each.differs = off
        yield each


def on_two_nodes(folder: Path) -> Iterator[Broken]:
    """A rank on each."""
    with star(NODES) as network, running(folder) as run:
        meeting = ["--nodes", "1:2", "--rendezvous", f"{network.hosts['first'].address}:{PORT}"]
        command = [sys.executable, "-m", "phalanx", "train", str(run.file), "--nproc", "1", "--resume", *meeting]

        def start(name: str) -> None:
            run.start(name, [*network.hosts[name].prefix, *command])

        start("first")
        start("second")
        run.trains(0, 2, EVERY)
        found = [
            run.broken("a node is killed", lambda: run.launchers["second"].kill(), 1),
            run.broken("that node returns", lambda: start("second"), 2),
            run.broken("the link to a node is cut", lambda: network.cut("second"), 1),
            run.broken("the link is restored", lambda: network.restore("second"), 2),
        ]
        end_in_order(run)
        off = differs(run)
    for each in found:
        each.differs = off
        yield each


def with_nan(folder: Path) -> Iterator[Broken]:
    """Two ranks under torchrun, whose gradients are not finite for some steps."""
    with running(folder) as run:
        ranks = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "benchmarks.faults", "--rank"]
        run.start("one", [sys.executable, *ranks, str(run.file)])
        until(lambda: any(event["what"] == ROLLED_BACK for event in read_events(run.directory)), "it goes back")
        event = next(event for event in read_events(run.directory) if event["what"] == ROLLED_BACK)
        at = next(when for when, step in run.seen if step >= NAN_STEPS[0] - 1)
        resumed = run.trains(1, 2, EVERY)
        end_in_order(run)
        name = f"gradients are NaN {BAD_STEPS} times in a row (recovery.rollbacks = 1)"
        lost = event["after"] - event["to"]
        yield Broken(name, event["time"] - at, resumed - at, lost, "2 ranks", differs(run))


def end_in_order(run: Running) -> None:
    """Tell the launchers to end."""
    for launcher in run.launchers.values():
        if launcher.poll() is None:
            launcher.terminate()
    until(lambda: all(launcher.poll() is not None for launcher in run.launchers.values()), "launchers have ended")


def spoiled_rank(file: Path) -> int:
    """A rank whose gradients of some text are NaN, whenever it meets that."""
    forward = Trainer.forward_backward
    rows = range((NAN_STEPS[0] - 1) * 16, NAN_STEPS[-1] * 16)

    def spoiled(self: Trainer, micros: Any, told: Any) -> Any:
        sums = forward(self, micros, told)
        if self.loader._first(self.step) in rows:
            for parameter in self.module.parameters():
                if parameter.grad is not None:
                    parameter.grad.fill_(torch.nan)
        return sums

    Trainer.forward_backward = spoiled  # type: ignore[method-assign]
    return work(file, [], resume=True)


def page(found: Sequence[Broken]) -> str:
    """What is written to docs/."""
    lines = "\n".join(
        f"| {each.fault} | {each.detect_seconds:.1f} | {each.resume_seconds:.1f} | {each.steps_lost} | "
        f"{each.goes_on} | {'yes' if each.differs < SAME else 'no'} ({each.differs:.0e}) |"
        for each in found
    )
    return f"""# What breaks a run, and what that costs

| what happens | s until ranks have stopped | s until the next step | steps lost | goes on with | same losses |
|---|---:|---:|---:|---|---|
{lines}

- Each run is broken half way between two checkpoints, of which there is one every {EVERY} steps. All times count from
  the fault. A step is lost if it was done and has to be done again.
- Same losses: all steps of the run, faults and all, beside one process that never failed: the largest relative
  difference of a loss, in fp64 (ranks sum in another order than one process does).
- A node that comes, or comes back, is a new start of all, in order: ranks save first. Where fewer nodes than possible
  meet, they wait for the last call, here of {LAST_CALL_SECONDS} s (`recovery.last_call_seconds`; 30 s by default),
  after a node that has gone without a word was missed for 10 s.
- NaN: from the first of {BAD_STEPS} such steps; ranks stay, and stop for nothing but the return. The run passes over
  the text of the steps that are lost, and so does the process beside it.
- Where it says started again, this benchmark did so at once, as a scheduler would. All else the run did by itself.
- Two cores for all nodes and ranks, with other work on them: most of the time until the first step is Python's start.
- Written by `python -m benchmarks.faults`.
"""


def main() -> None:
    """Break, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=Path, help="be a rank of the run whose gradients are NaN (under torchrun)")
    asked = parser.parse_args()
    if asked.rank:
        leave(spoiled_rank(asked.rank))
    found = []
    with tempfile.TemporaryDirectory(prefix="phalanx-faults-") as scratch:
        for number, kind in enumerate((on_one_machine, on_two_nodes, with_nan)):
            for each in kind(Path(scratch) / str(number)):
                print(each, file=sys.stderr, flush=True)
                found.append(each)
    text = page(found)
    print(text)
    PAGE.write_text(text)


if __name__ == "__main__":
    main()

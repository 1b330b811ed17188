"""What breaks a run, how soon that is noticed, how soon it trains again, and what is lost.

    python -m benchmarks.faults       # a quarter of an hour; prints the table; writes docs/results/benchmarks/faults.md

Real runs of `phalanx train`: two ranks on one machine, or one rank on each of two hosts (network namespaces of this
machine, which takes root). Each is broken on purpose while it trains, and held against one process that never failed.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.breaking import (
    BAD_STEPS,
    EVERY,
    LAST_CALL_SECONDS,
    SEQUENCES,
    TIMEOUT_SECONDS,
    Broken,
    Running,
    differs,
    running,
    same_bits,
)
from phalanx.launch.elastic_agent import run_until_done, stop_signals_as_exit
from phalanx.launch.failure_policy import FailurePolicy
from phalanx.launch.process import exit_rank, set_worker_environment
from phalanx.launch.rendezvous import SINGLE_NODE
from phalanx.runs.checkpoints import checkpoints
from phalanx.runs.events import ROLLED_BACK, read_events
from phalanx.spec.errors import EXIT_STOPPED
from phalanx.spec.files.load import load_run
from phalanx.testing.fault_injection import fill_disk, flip_bit, memory_limited, small_disk, truncate_file
from phalanx.testing.network_namespaces import star_network
from phalanx.testing.processes import rank_pids, wait_until
from phalanx.train.create_run import create_run
from phalanx.train.trainer import Trainer
from phalanx.train.worker import run_rank
from tests.helpers.faulty_rank import ALL_RANK_FAULTS

PAGE = Path(__file__).parents[1] / "docs" / "results" / "benchmarks" / "faults.md"
NODES, PORT = ("first", "second"), 29_400
SAME = 1e-10
"""Relative difference of losses, in fp64, of ranks that sum in another order."""
NAN_STEPS = range(50, 53)
"""Whose gradients are not finite, where that is the fault."""
PAUSES, PAUSE_SECONDS = 5, 0.5
"""Of a slow rank."""
ROOM_BYTES, DISK_BYTES = 2**20, 64 * 2**20
"""That are left to a rank whose memory is exhausted; of a disk that is filled."""
SOON = 5
"""Steps after which ranks do what they were ordered to: all have read the order by then."""


def on_one_machine(folder: Path) -> Iterator[Broken]:
    """Two ranks, and a fault after the other."""
    with running(folder) as run, memory_limited(ROOM_BYTES) as join:
        command = train(run, 2)

        def rank(sent: signal.Signals) -> Callable[[], None]:
            return lambda: os.kill(rank_pids(run.directory)[1], sent)

        def ended() -> None:
            code = run.launchers["one"].wait(timeout=60)
            assert code in (EXIT_STOPPED, -signal.SIGKILL), code
            run.start("one", command)

        run.start("one", command)
        run.trains(0, 2, EVERY)
        one, stands = run.launchers, f"a rank stands still (SIGSTOP), and collectives may take {TIMEOUT_SECONDS} s"
        found = [
            run.broken("a rank is killed (SIGKILL)", rank(signal.SIGKILL)),
            run.broken(stands, rank(signal.SIGSTOP)),
            slowed(run),
            run.broken("a rank has no memory left", lambda: join(rank_pids(run.directory)[1])),
            run.broken(
                "a rank is killed, and half of the newest checkpoint's file is gone", damaged(run, truncate_file)
            ),
            run.broken("one bit of it is another", damaged(run, flip_bit)),
            run.broken("the file is gone", damaged(run, Path.unlink)),
            run.broken("the run is stopped (SIGTERM), and started again", lambda: one["one"].terminate(), again=ended),
            run.broken(
                "its terminal is closed (SIGHUP), and it is started again",
                lambda: one["one"].send_signal(signal.SIGHUP),
                again=ended,
            ),
            run.broken("the launcher is killed, and started again", lambda: one["one"].kill(), again=ended),
        ]
        yield from compared(run, found, alike=2)


def train(run: Running, ranks: int) -> list[str]:
    """The command that a user types."""
    return [sys.executable, "-m", "phalanx", "train", str(run.file), "--nproc", str(ranks), "--resume"]


def compared(run: Running, found: Sequence[Broken], alike: int | None = None) -> Iterator[Broken]:
    """End a run, and hold it against one process; and against as many ranks, if it had always so many."""
    run.end()
    off, same = differs(run), same_bits(run, lambda other: train(other, alike)) if alike else None
    for each in found:
        each.differs, each.same_bits = off, same
        yield each


def slowed(run: Running) -> Broken:
    """A rank that stands still again and again, for less long than collectives may take: no failure."""
    run.between_saves()
    ranks, begun = rank_pids(run.directory), len(run.began())
    for _ in range(PAUSES):
        os.kill(ranks[1], signal.SIGSTOP)
        time.sleep(PAUSE_SECONDS)
        os.kill(ranks[1], signal.SIGCONT)
        step = run.seen[-1][1]
        wait_until(lambda before=step: run.seen[-1][1] > before + 2, "it goes on")  # type: ignore[misc]
    assert (rank_pids(run.directory), len(run.began())) == (ranks, begun)
    return Broken(f"a rank is slow: stands still for {PAUSE_SECONDS} s, {PAUSES} times", None, None, 0, "2 ranks")


def damaged(run: Running, harm: Callable[[Path], None]) -> Callable[[], None]:
    """Harm the newest checkpoint, and kill the ranks before they write another."""

    def strike() -> None:
        ranks = rank_pids(run.directory).values()
        for pid in ranks:
            os.kill(pid, signal.SIGSTOP)
        harm(next(checkpoints(run.directory / "checkpoints")[0].glob("shard-*")))
        for pid in ranks:
            os.kill(pid, signal.SIGKILL)

    return strike


def on_one_rank(folder: Path) -> Iterator[Broken]:
    """A run of one process, and its launcher."""
    with running(folder) as run:
        run.start("one", train(run, 1))
        run.trains(0, 1, EVERY)
        found = run.broken(
            "its only rank is killed", lambda: os.kill(rank_pids(run.directory)[0], signal.SIGKILL), ranks=1
        )
        yield from compared(run, [found], alike=1)


def on_a_full_disk(folder: Path) -> Iterator[Broken]:
    """Two ranks whose run directory has a disk of its own."""
    disk = folder.parent / "disk"
    with small_disk(disk, DISK_BYTES), running(folder, disk) as run:

        def space() -> None:
            code = run.launchers["one"].wait(timeout=100)
            assert code in (1, 2), code
            (disk / "others").unlink()
            run.start("one", train(run, 2))

        run.start("one", train(run, 2))
        run.trains(0, 2, EVERY)
        full = "the disk is full; once the run has ended there is space, and it is started again"
        yield from compared(run, [run.broken(full, lambda: fill_disk(disk), again=space)], alike=2)


def on_two_nodes(folder: Path) -> Iterator[Broken]:
    """A rank on each."""
    with star_network(NODES) as network, running(folder) as run:
        command = [*train(run, 1), "--nodes", "1:2", "--rendezvous", f"{network.hosts['first'].address}:{PORT}"]

        def start(name: str) -> None:
            run.start(name, [*network.hosts[name].prefix, *command])

        start("first")
        start("second")
        run.trains(0, 2, EVERY)
        found = [
            run.broken("a node is killed", lambda: run.launchers["second"].kill(), 1),
            run.broken("that node returns", lambda: start("second"), 2),
            run.broken("the link to a node is cut", lambda: network.disconnect("second"), 1),
            run.broken("the link is restored", lambda: network.reconnect("second"), 2),
        ]
        yield from compared(run, found)


# -- faults of the program ---------------------------------------------------------------------------------------------


def program(run: Running, fault: str) -> list[str]:
    """A launcher whose ranks do something wrong."""
    return [sys.executable, "-m", "benchmarks.faults", "--launch", fault, str(run.file)]


def launch(fault: str, file: Path) -> int:
    """What `phalanx train` does, but for the program of the ranks."""
    run = load_run(file)
    directory = create_run(run, 2, resume=False)
    set_worker_environment(2)
    recovery, words = (
        FailurePolicy(directory, run.recovery, SINGLE_NODE),
        ("benchmarks.faults", "--rank", fault, str(directory)),
    )
    with stop_signals_as_exit():
        return 0 if run_until_done(2, lambda _: words, recovery.decide, SINGLE_NODE) else recovery.code


def with_wrong_calls(folder: Path) -> Iterator[Broken]:
    """Two ranks, one of which leaves out a collective that the other calls, or calls another one."""
    with running(folder) as run:
        order = run.file.with_name("order")

        def ordered(fault: str) -> Callable[[], None]:
            def write() -> None:
                order.with_suffix(".new").write_text(f"{run.seen[-1][1] + SOON} {fault}")
                order.with_suffix(".new").rename(order)

            return write

        run.start("one", program(run, "wrong"))
        run.trains(0, 2, EVERY)
        faults = {
            "skipped": f"a rank leaves out a collective, which may take {TIMEOUT_SECONDS} s",
            "shape": "a rank calls a collective with another shape",
            "order": "a rank calls two collectives in another order",
        }
        found = [run.broken(name, ordered(fault), again=order.unlink) for fault, name in faults.items()]
        yield from compared(run, found, alike=2)


def with_nan(folder: Path) -> Iterator[Broken]:
    """Two ranks whose gradients are not finite for some steps."""
    with running(folder) as run:
        run.start("one", program(run, "nan"))
        wait_until(lambda: any(event["what"] == ROLLED_BACK for event in read_events(run.directory)), "it goes back")
        event = next(event for event in read_events(run.directory) if event["what"] == ROLLED_BACK)
        at = next(when for when, step in run.seen if step >= NAN_STEPS[0] - 1)
        resumed = run.trains(1, 2, EVERY)
        name = f"gradients are NaN {BAD_STEPS} times in a row (recovery.max_rollbacks = 1)"
        lost = event["after"] - event["to"]
        yield from compared(run, [Broken(name, event["time"] - at, resumed - at, lost, "2 ranks")])


def call_wrongly(directory: Path) -> None:
    """Do what is ordered, in the step that is named there."""
    step, order = Trainer.train_step, directory.parent / "order"

    def wrong(self: Trainer, batches: Any) -> Any:
        at, fault = order.read_text().split() if order.exists() else ("-1", "")
        if self.step == int(at):
            ALL_RANK_FAULTS[fault]()
        return step(self, batches)

    Trainer.train_step = wrong  # type: ignore[method-assign]


def spoil(directory: Path) -> None:
    """Gradients of some text are NaN, whenever ranks meet that."""
    forward = Trainer.forward_backward
    rows = range((NAN_STEPS[0] - 1) * SEQUENCES, NAN_STEPS[-1] * SEQUENCES)

    def spoiled(self: Trainer, micros: Any) -> Any:
        sums = forward(self, micros)
        if self.loader._first_sequence(self.step) in rows:
            for parameter in self.module.parameters():
                if parameter.grad is not None:
                    parameter.grad.fill_(torch.nan)
        return sums

    Trainer.forward_backward = spoiled  # type: ignore[method-assign]


RANKS = {"wrong": call_wrongly, "nan": spoil}


def rank(fault: str, directory: Path) -> None:
    """Train, with a fault."""
    RANKS[fault](directory)
    exit_rank(run_rank(directory, [], resume=True))


def page(found: Sequence[Broken]) -> str:
    """What is written to docs/."""
    lines = "\n".join(
        f"| {each.fault} | {seconds(each.detect_seconds)} | {seconds(each.resume_seconds)} | {each.steps_lost} | "
        f"{each.goes_on} | {'yes' if each.differs < SAME else 'no'} ({each.differs:.0e}) | "
        f"{'-' if each.same_bits is None else 'yes' if each.same_bits else 'no'} |"
        for each in found
    )
    return f"""# What breaks a run, and what that costs

| what happens | s until ranks stopped | s until the next step | steps lost | goes on with | same losses | same bits |
|---|---:|---:|---:|---|---|---|
{lines}

- Each run is broken half way between two checkpoints, of which there is one every {EVERY} steps. All times count from
  the fault. A step is lost if it was done and has to be done again.
- Same losses: all steps of the run, faults and all, beside one process that never failed: the largest relative
  difference of a loss, in fp64 (ranks sum in another order than one process does).
- Same bits: all these losses are, to the last bit, those of another run of as many ranks that never failed. Not asked
  where ranks were fewer for a while, or text was passed over.
- A node that comes, or comes back, is a new start of all, in order: ranks save first. Where fewer nodes than possible
  meet, they wait for the last call, here of {LAST_CALL_SECONDS} s \
(`recovery.last_call_timeout_seconds`; 30 s by default),
  after a node that has gone without a word was missed for 10 s.
- No memory left: the rank joins a cgroup in which it may take {ROOM_BYTES // 2**20} MiB more, and the kernel kills it.
- A full disk: the run is started again by itself until that has been in vain as often as it may be
  (`recovery.max_restarts`), and ends.
- Collectives: ranks call some that do not belong to the step, {SOON} steps after they are told to.
- NaN: from the first of {BAD_STEPS} such steps; ranks stay, and stop for nothing but the return. The run passes over
  the text of the steps that are lost, and so does the process beside it.
- Where it says started again, this benchmark did so at once, as a scheduler would. All else the run did by itself.
- Two cores for all nodes and ranks: most of the time until the next step is the start of Python and PyTorch.
- Written by `python -m benchmarks.faults`.
"""


def seconds(value: float | None) -> str:
    """As a cell."""
    return "-" if value is None else f"{value:.1f}"


KINDS = on_one_machine, on_one_rank, on_a_full_disk, on_two_nodes, with_wrong_calls, with_nan


def main() -> None:
    """Break, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launch", nargs=2, metavar=("FAULT", "FILE"), help="be a launcher of wrong ranks")
    parser.add_argument("--rank", nargs=2, metavar=("FAULT", "DIRECTORY"), help="be one of these ranks")
    asked = parser.parse_args()
    if asked.rank:
        rank(asked.rank[0], Path(asked.rank[1]))
    if asked.launch:
        sys.exit(launch(asked.launch[0], Path(asked.launch[1])))
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup, runs would rightly not hear it
    found = []
    with tempfile.TemporaryDirectory(prefix="phalanx-faults-") as scratch:
        for number, kind in enumerate(KINDS):
            for each in kind(Path(scratch) / str(number)):
                print(each, file=sys.stderr, flush=True)
                found.append(each)
    text = page(found)
    print(text)
    PAGE.write_text(text)


if __name__ == "__main__":
    main()

"""Measure failures of a run: the time until detection, the time until training resumes, and the lost steps.

    python -m benchmarks.faults       # a quarter of an hour; prints the table; writes docs/results/benchmarks/faults.md

The runs of `phalanx train` are real: two ranks on one machine, or one rank on each of two hosts. The hosts are network
namespaces of this machine, which requires root. Each run is broken on purpose and compared with one process that never
failed.
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
    FaultResult,
    RunUnderTest,
    breakable_run,
    has_same_bits,
    max_loss_difference,
)
from benchmarks.pages import write_results
from phalanx.launch.elastic_agent import run_until_done, stop_signals_as_exit
from phalanx.launch.failure_policy import FailurePolicy
from phalanx.launch.process import exit_rank, set_worker_environment
from phalanx.launch.rendezvous import SINGLE_NODE
from phalanx.runs.checkpoints import checkpoints
from phalanx.runs.events import ROLLED_BACK, read_events
from phalanx.spec.errors import EXIT_STOPPED
from phalanx.spec.files.load import load_run
from phalanx.spec.log import log_to_stderr
from phalanx.testing.fault_injection import fill_disk, flip_bit, memory_limited, small_disk, truncate_file
from phalanx.testing.network_namespaces import star_network
from phalanx.testing.processes import rank_pids, wait_until
from phalanx.train.create_run import create_run
from phalanx.train.rank_options import RankOptions
from phalanx.train.trainer import Trainer
from phalanx.train.worker import run_rank
from tests.helpers.faulty_rank import ALL_RANK_FAULTS

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "results" / "benchmarks" / "faults.md"
NODES, PORT = ("first", "second"), 29_400
SAME = 1e-10
"""Maximum relative difference of losses in fp64 between ranks that sum in different orders."""
NAN_STEPS = range(50, 53)
"""Steps with non-finite gradients, in the run with this fault."""
PAUSES, PAUSE_SECONDS = 5, 0.5
"""Number and length of the pauses of a slow rank."""
ROOM_BYTES, DISK_BYTES = 2**20, 64 * 2**20
"""Remaining memory of a rank that runs out of memory, and size of a disk that is filled."""
SOON = 5
"""Steps between an order and its execution, in which all ranks read the order."""


def on_one_machine(folder: Path) -> Iterator[FaultResult]:
    """Break a run of two ranks by one fault after the other."""
    with breakable_run(folder) as run, memory_limited(ROOM_BYTES) as join:
        command = train_command(run, 2)

        def rank(number: signal.Signals) -> Callable[[], None]:
            return lambda: os.kill(rank_pids(run.directory)[1], number)

        def ended() -> None:
            code = run.launchers["one"].wait(timeout=60)
            assert code in (EXIT_STOPPED, -signal.SIGKILL), code
            run.start("one", command)

        run.start("one", command)
        run.wait_for_steps(0, 2, EVERY)
        launchers, stopped = (
            run.launchers,
            f"a rank is stopped (SIGSTOP); the timeout of collectives is {TIMEOUT_SECONDS} s",
        )
        results = [
            run.measure_fault("a rank is killed (SIGKILL)", rank(signal.SIGKILL)),
            run.measure_fault(stopped, rank(signal.SIGSTOP)),
            measure_slow_rank(run),
            run.measure_fault("a rank runs out of memory", lambda: join(rank_pids(run.directory)[1])),
            run.measure_fault(
                "a rank is killed, and half of a file of the latest checkpoint is missing",
                damage_and_kill(run, truncate_file),
            ),
            run.measure_fault("a rank is killed, and a bit of that file is flipped", damage_and_kill(run, flip_bit)),
            run.measure_fault("a rank is killed, and that file is missing", damage_and_kill(run, Path.unlink)),
            run.measure_fault(
                "the run is stopped (SIGTERM) and restarted", lambda: launchers["one"].terminate(), react=ended
            ),
            run.measure_fault(
                "the terminal is closed (SIGHUP), and the run is restarted",
                lambda: launchers["one"].send_signal(signal.SIGHUP),
                react=ended,
            ),
            run.measure_fault("the launcher is killed and restarted", lambda: launchers["one"].kill(), react=ended),
        ]
        yield from compare_with_references(run, results, num_ranks=2)


def train_command(run: RunUnderTest, ranks: int) -> list[str]:
    """Return the command line of a user."""
    return [sys.executable, "-m", "phalanx", "train", str(run.file), "--nproc", str(ranks), "--resume"]


def compare_with_references(
    run: RunUnderTest, results: Sequence[FaultResult], num_ranks: int | None = None
) -> Iterator[FaultResult]:
    """End a run; compare it with one process, and with `num_ranks` ranks if its number of ranks was constant."""
    run.end()
    difference, same = (
        max_loss_difference(run),
        has_same_bits(run, lambda reference: train_command(reference, num_ranks)) if num_ranks else None,
    )
    for result in results:
        result.loss_difference, result.same_bits = difference, same
        yield result


def measure_slow_rank(run: RunUnderTest) -> FaultResult:
    """Stop a rank several times for less than the timeout of collectives, which is not a failure."""
    run.wait_between_saves()
    ranks, num_starts = rank_pids(run.directory), len(run.starts())
    for _ in range(PAUSES):
        os.kill(ranks[1], signal.SIGSTOP)
        time.sleep(PAUSE_SECONDS)
        os.kill(ranks[1], signal.SIGCONT)
        step = run.seen[-1][1]
        wait_until(lambda last_step=step: run.seen[-1][1] > last_step + 2, "more steps")  # type: ignore[misc]
    assert (rank_pids(run.directory), len(run.starts())) == (ranks, num_starts)
    return FaultResult(f"a rank is slow: it is stopped for {PAUSE_SECONDS} s, {PAUSES} times", None, None, 0, "2 ranks")


def damage_and_kill(run: RunUnderTest, harm: Callable[[Path], None]) -> Callable[[], None]:
    """Return a strike that damages the latest checkpoint, and kills the ranks before they write another one."""

    def strike() -> None:
        ranks = rank_pids(run.directory).values()
        for pid in ranks:
            os.kill(pid, signal.SIGSTOP)
        harm(next(checkpoints(run.directory / "checkpoints")[0].glob("shard-*")))
        for pid in ranks:
            os.kill(pid, signal.SIGKILL)

    return strike


def on_one_rank(folder: Path) -> Iterator[FaultResult]:
    """Break a run of one rank."""
    with breakable_run(folder) as run:
        run.start("one", train_command(run, 1))
        run.wait_for_steps(0, 1, EVERY)
        result = run.measure_fault(
            "the only rank of a run is killed", lambda: os.kill(rank_pids(run.directory)[0], signal.SIGKILL), ranks=1
        )
        yield from compare_with_references(run, [result], num_ranks=1)


def on_a_full_disk(folder: Path) -> Iterator[FaultResult]:
    """Break a run of two ranks whose run directory is on a small disk."""
    disk = folder.parent / "disk"
    with small_disk(disk, DISK_BYTES), breakable_run(folder, disk) as run:

        def space() -> None:
            code = run.launchers["one"].wait(timeout=100)
            assert code in (1, 2), code
            (disk / "others").unlink()
            run.start("one", train_command(run, 2))

        run.start("one", train_command(run, 2))
        run.wait_for_steps(0, 2, EVERY)
        full = "the disk is full; after the run has ended, space is freed and the run is restarted"
        yield from compare_with_references(
            run, [run.measure_fault(full, lambda: fill_disk(disk), react=space)], num_ranks=2
        )


def on_two_nodes(folder: Path) -> Iterator[FaultResult]:
    """Break a run with one rank on each of two nodes."""
    with star_network(NODES) as network, breakable_run(folder) as run:
        command = [*train_command(run, 1), "--nodes", "1:2", "--rendezvous", f"{network.hosts['first'].address}:{PORT}"]

        def start(name: str) -> None:
            run.start(name, [*network.hosts[name].prefix, *command])

        start("first")
        start("second")
        run.wait_for_steps(0, 2, EVERY)
        results = [
            run.measure_fault("a node is killed", lambda: run.launchers["second"].kill(), 1),
            run.measure_fault("the killed node rejoins", lambda: start("second"), 2),
            run.measure_fault("the link to a node is cut", lambda: network.disconnect("second"), 1),
            run.measure_fault("the link is restored", lambda: network.reconnect("second"), 2),
        ]
        yield from compare_with_references(run, results)


# -- faults of the program ---------------------------------------------------------------------------------------------


def faulty_command(run: RunUnderTest, fault: str) -> list[str]:
    """Return the command line of a launcher whose ranks have this fault."""
    return [sys.executable, "-m", "benchmarks.faults", "--launch", fault, str(run.file)]


def launch_faulty_ranks(fault: str, file: Path) -> int:
    """Launch ranks as `phalanx train` does, with another program for the ranks."""
    run = load_run(file)
    directory = create_run(run, 2, resume=False)
    set_worker_environment(2)
    # Ranks do not import from the working directory.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    recovery = FailurePolicy(directory, run.recovery, SINGLE_NODE)
    command = "benchmarks.faults", "--rank", fault, str(directory)
    with stop_signals_as_exit():
        return 0 if run_until_done(2, lambda _: command, recovery.decide, SINGLE_NODE) else recovery.exit_code


def with_wrong_calls(folder: Path) -> Iterator[FaultResult]:
    """Break a run of two ranks by a skipped or wrong collective of one rank."""
    with breakable_run(folder) as run:
        order = run.file.with_name("order")

        def ordered(fault: str) -> Callable[[], None]:
            def write() -> None:
                order.with_suffix(".new").write_text(f"{run.seen[-1][1] + SOON} {fault}")
                order.with_suffix(".new").rename(order)

            return write

        run.start("one", faulty_command(run, "wrong"))
        run.wait_for_steps(0, 2, EVERY)
        faults = {
            "skipped": f"a rank skips a collective; the timeout of collectives is {TIMEOUT_SECONDS} s",
            "shape": "a rank calls a collective with a wrong shape",
            "order": "a rank calls two collectives in the wrong order",
        }
        results = [run.measure_fault(name, ordered(fault), react=order.unlink) for fault, name in faults.items()]
        yield from compare_with_references(run, results, num_ranks=2)


def with_nan(folder: Path) -> Iterator[FaultResult]:
    """Break a run of two ranks by non-finite gradients in some steps."""
    with breakable_run(folder) as run:
        run.start("one", faulty_command(run, "nan"))
        wait_until(lambda: any(event["kind"] == ROLLED_BACK for event in read_events(run.directory)), "a rollback")
        event = next(event for event in read_events(run.directory) if event["kind"] == ROLLED_BACK)
        first_nan_time = next(observed_at for observed_at, step in run.seen if step >= NAN_STEPS[0] - 1)
        resumed = run.wait_for_steps(1, 2, EVERY)
        name = f"gradients are NaN in {BAD_STEPS} successive steps (recovery.max_rollbacks = 1)"
        steps_lost = event["after"] - event["to"]
        yield from compare_with_references(
            run, [FaultResult(name, event["time"] - first_nan_time, resumed - first_nan_time, steps_lost, "2 ranks")]
        )


def call_wrongly(directory: Path) -> None:
    """Patch the trainer to execute an order in the step that the order names."""
    step, order = Trainer.launch_step, directory.parent / "order"

    def wrong(self: Trainer, batches: Any) -> Any:
        ordered_step, fault = order.read_text().split() if order.exists() else ("-1", "")
        if self.step == int(ordered_step):
            ALL_RANK_FAULTS[fault]()
        return step(self, batches)

    Trainer.launch_step = wrong  # type: ignore[method-assign]


def spoil(directory: Path) -> None:
    """Patch the trainer to set the gradients of some sequences to NaN."""
    forward = Trainer.forward_backward
    rows = range((NAN_STEPS[0] - 1) * SEQUENCES, NAN_STEPS[-1] * SEQUENCES)

    def spoiled(self: Trainer, micros: Any) -> Any:
        sums = forward(self, micros)
        if self.loader.loader.first_sequence(self.step) in rows:
            for parameter in self.module.parameters():
                if parameter.grad is not None:
                    parameter.grad.fill_(torch.nan)
        return sums

    Trainer.forward_backward = spoiled  # type: ignore[method-assign]


RANKS = {"wrong": call_wrongly, "nan": spoil}


def rank(fault: str, directory: Path) -> None:
    """Train with a fault."""
    log_to_stderr()
    RANKS[fault](directory)
    exit_rank(run_rank(directory, RankOptions(resume=True)))


def page(results: Sequence[FaultResult]) -> str:
    """Return the page of the benchmark."""
    lines = "\n".join(
        f"| {result.fault} | {format_seconds(result.detect_seconds)} | {format_seconds(result.resume_seconds)} "
        f"| {result.steps_lost} | {result.continues_with} "
        f"| {'yes' if result.loss_difference < SAME else 'no'} ({result.loss_difference:.0e}) | "
        f"{'-' if result.same_bits is None else 'yes' if result.same_bits else 'no'} |"
        for result in results
    )
    return f"""# Failures of a run and their cost

| failure | s until ranks stopped | s until the next step | steps lost | continues with | equal losses | equal bits |
|---|---:|---:|---:|---|---|---|
{lines}

- Each failure occurs halfway between two checkpoints, which are {EVERY} steps apart. All times count from the failure.
  A step is lost if it was finished and must be repeated.
- "Equal losses" compares all steps of the run with a single process that never failed. The value is the largest
  relative difference of a loss in fp64; ranks sum in a different order than a single process.
- "Equal bits" compares these losses bit by bit with a run of the same number of ranks that never failed. It does not
  apply to runs that had fewer ranks for a while or skipped text.
- When a node joins or rejoins, all ranks save a checkpoint and restart. A rendezvous with fewer nodes than the maximum
  waits {LAST_CALL_SECONDS} s for more nodes \
(`recovery.last_call_timeout_seconds`; the default is 30 s).
  A node that disappears without leaving is detected after 10 s.
- Out of memory: the rank joins a cgroup with {ROOM_BYTES // 2**20} MiB of free memory, and the kernel kills the rank.
- Full disk: the launcher restarts the ranks until `recovery.max_restarts` successive restarts have failed. Then the run
  ends.
- Collectives: ranks make calls that do not belong to the step, {SOON} steps after they are ordered to.
- NaN: times count from the first of {BAD_STEPS} such steps. The processes keep running and pause only for the rollback.
  The run and the reference process skip the text of the lost steps.
- This benchmark restarted the runs that are marked "restarted", at once, as a scheduler would. The runs recovered from
  all other failures automatically.
- All nodes and ranks share two cores, so most of the time until the next step is the start of Python and PyTorch.
- Written by `python -m benchmarks.faults`.
"""


def format_seconds(value: float | None) -> str:
    """Format seconds as a table cell."""
    return "-" if value is None else f"{value:.1f}"


KINDS = on_one_machine, on_one_rank, on_a_full_disk, on_two_nodes, with_wrong_calls, with_nan


def main() -> None:
    """Break the runs, print the table and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launch", nargs=2, metavar=("FAULT", "FILE"), help="run as the launcher of faulty ranks")
    parser.add_argument("--rank", nargs=2, metavar=("FAULT", "DIRECTORY"), help="run as a faulty rank")
    args = parser.parse_args()
    if args.rank:
        rank(args.rank[0], Path(args.rank[1]))
    if args.launch:
        sys.exit(launch_faulty_ranks(args.launch[0], Path(args.launch[1])))
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup, runs would ignore the signal
    results = []
    with tempfile.TemporaryDirectory(prefix="phalanx-faults-") as scratch:
        for number, kind in enumerate(KINDS):
            for result in kind(Path(scratch) / str(number)):
                print(result, file=sys.stderr, flush=True)
                results.append(result)
    text = page(results)
    print(text)
    write_results(PAGE, text)


if __name__ == "__main__":
    main()

"""Measure the cost of the guards with default settings: the flight recorder and the watchdog thread.

    python -m benchmarks.guards        # prints the table and writes docs/results/benchmarks/guards.md

A process enables or disables the recorder when it creates its first group. Therefore, two pairs of ranks train the same
run, one with the guards and one without, and take steps in turn. Steps differ by more than the cost of the guards, so
the guards are also timed alone: many collectives of one rank with and without the recorder, and many polls of the
watchdog."""

from __future__ import annotations

import json
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
import torch._C._distributed_c10d as c10d
import torch.distributed as dist

from benchmarks.pages import write_results
from benchmarks.recording import LARGER, SMALL, make_run
from phalanx.data.loader import prefetch
from phalanx.launch.process import BUFFER_VARIABLE, MAX_RECORDED_COLLECTIVES, init_distributed
from phalanx.runs.create import read_run_directory
from phalanx.train.create_run import create_run
from phalanx.train.guards.flight_recorder import recorder_fingerprint
from phalanx.train.guards.replica_check import check_replica_consistency
from phalanx.train.guards.watchdog import MAX_POLL_SECONDS, Watchdog
from phalanx.train.trainer import Trainer
from phalanx.train.training_data import open_training_data

PAGE = Path(__file__).parents[1] / "docs" / "results" / "benchmarks" / "guards.md"
GOAL = 1.01
ROUNDS, STARTS, CALLS = 30, 4, 5000
TINY = {**SMALL, "hidden_size": 64, "num_layers": 2, "ffn_hidden_size": 128}
RUNS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tiny, tp 2": (TINY, {"tp": 2}),
    "small, ddp": (SMALL, {}),
    "small, tp 2": (SMALL, {"tp": 2}),
    "small, pp 2, 16 micro-batches": (SMALL, {"pp": 2, "micro_batch_size": 1}),
    "larger, zero3": (LARGER, {"data_parallel": "zero3"}),
}
CLOCKS = time.perf_counter, time.process_time, time.thread_time
Ranks = list[subprocess.Popen[str]]


def serve(directory: str) -> None:
    """Run as a rank: execute each line of standard input, and print its seconds."""
    run, data = read_run_directory(Path(directory))
    torch.set_num_threads(1)
    init_distributed("cpu", 600)
    single_rank_group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    guarded = os.environ[BUFFER_VARIABLE] != "0"
    trainer = Trainer(run, open_training_data(run, data, True), Path(directory), torch.device("cpu"), 1e11)
    if guarded:
        watchdog = Watchdog(Path(directory), run.training.collective_timeout_seconds)
        watchdog.trainer = trainer
        watchdog.__enter__()
    batches, tensor = prefetch(trainer.loader, 0, run.training.steps), torch.ones(1)
    operations: dict[str, Callable[[], Any]] = {
        "step": lambda: trainer.train_step(batches),
        "collectives": lambda: [dist.all_reduce(tensor, group=single_rank_group) for _ in range(CALLS)],
        "looks": lambda: [(trainer.step, recorder_fingerprint()) for _ in range(CALLS)],
        "replicas": lambda: check_replica_consistency(trainer.strategy, trainer.optimizers, trainer.mesh.dims, 1, 1),
    }
    for line in sys.stdin:
        num_before, clocks = num_recorded_collectives(), [clock() for clock in CLOCKS]
        operations[line.strip()]()
        seconds = [clock() - start for clock, start in zip(CLOCKS, clocks, strict=True)]
        print(json.dumps([*seconds, num_recorded_collectives() - num_before]), flush=True)
    os._exit(0)


def num_recorded_collectives() -> int:
    """Return the number of collectives recorded so far."""
    entries = pickle.loads(c10d._dump_fr_trace(True, False, False))["entries"]  # type: ignore[attr-defined]
    return int(entries[-1]["record_id"]) if entries else 0


def start_pair(directory: Path, guarded: bool) -> Ranks:
    """Start a pair of ranks."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    variables |= {"LOCAL_WORLD_SIZE": "2", BUFFER_VARIABLE: str(MAX_RECORDED_COLLECTIVES if guarded else 0)}
    command = [sys.executable, "-m", "benchmarks.guards", str(directory)]
    return [
        subprocess.Popen(
            command,
            env={**os.environ, **variables, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]


def measure(pair: Ranks, operation: str) -> tuple[float, float, float, int]:
    """Let both ranks execute `operation`, and measure it.

    Returns:
        The seconds of the slower rank, the CPU seconds of both processes, the CPU seconds of rank 0's thread, and the
        number of recorded collectives.
    """
    for rank in pair:
        assert rank.stdin is not None
        rank.stdin.write(f"{operation}\n")
        rank.stdin.flush()
    outputs = [json.loads(rank.stdout.readline()) for rank in pair if rank.stdout is not None]
    return max(output[0] for output in outputs), sum(output[1] for output in outputs), outputs[0][2], outputs[0][3]


def row(name: str, out: Path) -> tuple[str, float]:
    """Measure a run; return its row and its computed ratio."""
    directory = create_run(make_run(out, *RUNS[name]), 2, resume=False)
    walls, works, steps, recorder, looks, replicas, calls = [], [], [], [], [], [], 0
    for start in range(STARTS):
        pairs = {guarded: start_pair(directory, guarded) for guarded in ((True, False), (False, True))[start % 2]}
        for pair in pairs.values():
            for _ in range(3):
                measure(pair, "step")
        for number in range(ROUNDS):
            measured = {
                guarded: measure(pairs[guarded], "step") for guarded in ((True, False), (False, True))[number % 2]
            }
            walls.append(measured[True][0] / measured[False][0])
            works.append(measured[True][1] / measured[False][1])
            steps.append(measured[False][0])
            calls = measured[True][3]
        seconds_per_call = {
            guarded: min(measure(pair, "collectives")[2] for _ in range(5)) / CALLS for guarded, pair in pairs.items()
        }
        recorder.append(seconds_per_call[True] - seconds_per_call[False])
        looks.append(min(measure(pairs[True], "looks")[2] for _ in range(3)) / CALLS)
        replicas.append(measure(pairs[True], "replicas")[0])
        for rank in (rank for pair in pairs.values() for rank in pair):
            rank.communicate()
    step, each_call, look = median(steps), median(recorder), median(looks)
    least = 1 + calls * each_call / step + look / MAX_POLL_SECONDS
    cells = [f"{step * 1e3:.0f}", str(calls), format_median(walls), format_median(works), f"{each_call * 1e6:.1f}"]
    cells += [f"{look * 1e6:.0f}", f"{least:.4f}", f"{median(replicas) * 1e3:.0f}"]
    return f"| {' | '.join([name, *cells])} |", least


def format_median(ratios: Sequence[float]) -> str:
    """Format the median and its uncertainty: the notch of a box plot.

    McGill, Tukey and Larsen, The American Statistician 32, 1978, section 7.
    """
    first, middle, third = quantiles(ratios, n=4)
    return f"{middle:.3f} ± {1.57 * (third - first) / len(ratios) ** 0.5:.3f}"


def main() -> None:
    """Measure, print the table and write the page."""
    with tempfile.TemporaryDirectory() as folder:
        rows, shares = zip(*(row(name, Path(folder) / str(at)) for at, name in enumerate(RUNS)), strict=True)
    worst = max(shares)
    text = f"""# Cost of the guards

| run, 2 ranks | step, ms | recorded collectives | on / off | on / off, CPU time | recorder per collective, microseconds | poll, microseconds | on / off, computed | replica check, ms |
|---|---:|---:|---:|---:|---:|---:|---:|---:|
{chr(10).join(rows)}

"On" is the default: PyTorch's flight recorder keeps the last {MAX_RECORDED_COLLECTIVES:,} collectives of every rank,
and the watchdog thread checks for progress {1 / MAX_POLL_SECONDS:.0f} times per second. The goal is a computed ratio of
at most {GOAL}: {"met" if worst <= GOAL else "missed"} ({worst:.4f} at most).

The computed ratio adds the costs that are timed alone in one thread. The first cost is the time that the recorder adds
to a collective of one rank, times the number of collectives in a step. Each time is the best of five series of
{CALLS:,} collectives. The second cost is that of the polls.

The other ratios are medians over {ROUNDS * STARTS} steps of two pairs of ranks that take turns, in {STARTS} successive
starts. The ± values are the notches of the medians. On a CPU, gloo's point-to-point messages of a pipeline are not
recorded. The replica check (`training.replica_check_interval`) is off by default.

Written by `python -m benchmarks.guards`, with one thread per rank.
"""  # noqa: E501
    print(text)
    write_results(PAGE, text)


if __name__ == "__main__":
    serve(sys.argv[1]) if len(sys.argv) > 1 else main()

"""Check the state of runs on a GPU from the command line: checkpoints, and killed, hung and out-of-memory ranks."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks.gpu.harness import (
    COMMAND_SECONDS,
    Table,
    real_or_dry,
    require_on_device,
    run_phalanx,
    settings,
    step_records,
)
from benchmarks.gpu.runs import outcome
from phalanx.runs.step_records import read_rank_records
from phalanx.testing.processes import rank_pids, wait_until
from phalanx.testing.rank_pool import shared_gpu_environment

TITLE = "State of a run on one GPU"
COLUMNS = ("check", "outcome", "seconds")
NOTES = """
All checks use the command line. In "kill -9", a rank is killed after its first checkpoint, on disk or in the memory of
its launcher, and its launcher restarts it. With `training.deterministic`, losses and norms must be bitwise equal to
those of an undisturbed run. Two ranks share the GPU by `NCCL_HOSTID`.
"""
STEPS, TIMEOUT_SECONDS = real_or_dry(300, 30), 20.0
Ranks = list[subprocess.Popen[bytes]]


def measure(table: Table) -> None:
    """Run each check in its own folder."""
    with tempfile.TemporaryDirectory() as folder:
        for name, check in CHECKS.items():
            table.measure(name, partial(outcome, check, Path(folder) / name.replace(" ", "-")))


def checkpoint_stall(place: Path) -> str:
    """Measure the time that a step waits for a checkpoint, which a thread writes."""
    preset, tokens = real_or_dry(("gpt2-124m", 16384), ("tiny", 1024))
    sets = settings(f"model.preset={preset}", f"training.tokens_per_step={tokens}", "training.steps=24")
    run_phalanx(place, "train", "run.toml", *sets, *settings("checkpoint.every=4", "checkpoint.keep=1"))
    records, _, _ = read_rank_records(place / "runs/run", problems := [])
    assert not problems, problems[0]
    stalls = [pause["seconds"] * 1e3 for pause in records[0].pauses if pause["pause"] == "checkpoint"]
    (newest,) = (place / "runs/run/checkpoints").glob("step-*[0-9]")
    size = sum(file.stat().st_size for file in newest.rglob("*") if file.is_file())
    return f"{preset}, {size / 2**30:.2f} GiB: {median(stalls):.0f} ms, at most {max(stalls):.0f}, of {len(stalls)}"


def restart_bitwise(place: Path, *changes: str) -> str:
    """Kill a rank, and compare the run with an undisturbed run."""
    sets = settings("training.deterministic=true", f"training.steps={STEPS}", *changes)
    run_phalanx(place, "train", "run.toml", *sets, "--set", "name=whole")
    command = [sys.executable, "-m", "phalanx", "train", "run.toml", *sets, "--set", "name=killed"]
    directory = place / "runs/killed"
    with subprocess.Popen(command, cwd=place, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as launcher:
        try:
            wait_until(lambda: reached_step(place, "killed", 25), "25 steps", COMMAND_SECONDS)
            (pid,) = rank_pids(directory).values()
            os.kill(pid, signal.SIGKILL)
            output, _ = launcher.communicate(timeout=COMMAND_SECONDS)
        finally:
            launcher.kill()
    assert launcher.returncode == 0, output[-1500:]
    whole, killed = ({record["step"]: record for record in step_records(place, name)} for name in ("whole", "killed"))
    resumed_at = killed[STEPS]["resumed_at_step"]
    assert resumed_at > 0, "the run restarted at step 0"
    different = [step for step in whole if any(whole[step][key] != killed[step][key] for key in ("loss", "grad_norm"))]
    assert not different, f"steps from {different[0]} on differ, of {STEPS}; resumed at {resumed_at}"
    return f"resumed at {resumed_at}, {STEPS} losses and norms equal to the bit"


def reached_step(place: Path, name: str, step: int) -> bool:
    """Return whether a run has reached a step."""
    file = place / "runs" / name / "metrics.jsonl"
    return file.exists() and file.read_text().count('"loss"') >= step


def out_of_memory(place: Path) -> str:
    """Exhaust the memory of the GPU, and check the reported memory."""
    sets = settings("training.seq_len=1024", "training.tokens_per_step=8388608", "layout.micro_batch_size=8192")
    sets += settings("recovery.max_restarts=1")
    output = run_phalanx(place, "train", "run.toml", "--force", *sets, expected_exit_codes=(2,))
    (failure,) = (json.loads(file.read_text()) for file in (place / "runs/run/failures").glob("*.json"))
    memory = failure["held_bytes"]
    assert "out of memory" in output, output[-1500:]
    return f"failure file: {memory['total'] / 2**30:.1f} GiB held, {memory['reserved'] / 2**30:.1f} reserved"


def contexts(place: Path) -> str:
    """Check that each rank has one context on the GPU."""
    with two_ranks(place) as ranks:
        query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
        require_on_device("nvidia-smi")
        shown = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30).stdout.split("\n")
    lines = [line.split(", ") for line in shown if line]
    mine = [int(used) for pid, used in lines if int(pid) in {rank.pid for rank in ranks}]
    if not mine:
        return f"nvidia-smi shows {len(lines)} processes, none of them with a process id of this machine"
    assert len(mine) == len(ranks), f"{len(mine)} contexts of {len(ranks)} ranks"
    return f"one each: {', '.join(f'{used:,} MiB' for used in mine)}"


def stopped_rank(place: Path) -> str:
    """Stop a rank, and check that phalanx debug names it."""
    with two_ranks(place) as ranks:
        os.kill(ranks[1].pid, signal.SIGSTOP)
        ranks[0].wait(timeout=COMMAND_SECONDS)
    output = run_phalanx(place, "debug", "runs/run", expected_exit_codes=(0, 1))
    verdict = next((line for line in output.splitlines() if "rank 1" in line), None)
    assert verdict is not None, output[-1500:]
    return verdict.strip()


@contextmanager
def two_ranks(place: Path) -> Iterator[Ranks]:
    """Yield two ranks of a run that share the GPU, after some steps; kill them at the end."""
    sets = settings("training.steps=100000", f"training.collective_timeout_seconds={TIMEOUT_SECONDS}")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    ranks: Ranks = []
    try:
        for rank in range(2):
            variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
            variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
            environment = {**os.environ, **{name: str(value) for name, value in variables.items()}}
            ranks.append(start_rank(place, rank, sets, environment | shared_gpu_environment(rank)))
        wait_until(lambda: reached_step(place, "run", 5) or has_failed(ranks), "five steps", COMMAND_SECONDS)
        assert not has_failed(ranks), (place / "rank0.log").read_text()[-1500:]
        yield ranks
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def start_rank(
    place: Path, rank: int, arguments: Sequence[str], environment: dict[str, str]
) -> subprocess.Popen[bytes]:
    with open(place / f"rank{rank}.log", "wb") as log:
        command = [sys.executable, "-m", "phalanx.train", "run.toml", *arguments]
        return subprocess.Popen(command, cwd=place, env=environment, stdout=log, stderr=log)


def has_failed(ranks: Ranks) -> bool:
    return any(process.poll() is not None for process in ranks)


CHECKS: dict[str, Callable[[Path], str]] = {
    "checkpoint stall": checkpoint_stall,
    "kill -9, checkpoint": restart_bitwise,
    "kill -9, copy in memory": lambda place: restart_bitwise(
        place, "recovery.in_memory_checkpoint_every=4", "checkpoint.every=1000"
    ),
    "kill -9, experts": lambda place: restart_bitwise(
        place, "model.moe.num_experts=8", "model.moe.top_k=2", "model.moe.expert_ffn_size=256"
    ),
    "out of memory": out_of_memory,
    "contexts": contexts,
    "stopped rank": stopped_rank,
}

"""Start of a rank from a run file, as under torchrun."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.launch import process
from phalanx.runs.events import read_events
from phalanx.runs.lock import acquire_run_lock
from phalanx.runs.metrics import read_metrics
from phalanx.spec.files.write import to_toml
from phalanx.spec.run import RunSpec
from phalanx.train import create_run, worker
from phalanx.train.callbacks.callback import Callback
from phalanx.train.rank_options import RankOptions
from tests.helpers.small_runs import DENSE, make_trainer, small_run, train_until


class KillRankOnce(Callback):
    """A callback that kills a rank after a step, at the first start only."""

    def __init__(self, rank: int, step: int, marker: str) -> None:
        self.rank = rank
        self.step = step
        self.marker = Path(marker)

    def on_step_end(self, trainer: Any, record: Any) -> None:
        if (trainer.mesh.rank, trainer.step) == (self.rank, self.step) and not self.marker.exists():
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def run_torchrun(run: RunSpec, folder: Path, options: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    """Train a run on two ranks of torchrun."""
    file = folder / "run.toml"
    file.write_text(to_toml(run))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *options]
    return subprocess.run([*torchrun, "-m", "phalanx.train", str(file)], capture_output=True, text=True, timeout=180)


def test_torchrun_resumes_run_after_killed_rank(text: Path, tmp_path: Path) -> None:
    kill = {"class": f"{__name__}:KillRankOnce", "rank": 1, "step": 5, "marker": str(tmp_path / "killed")}
    changes = {"training.steps": 8, "checkpoint": {"every": 2}}
    result = run_torchrun(
        small_run(text, tmp_path, {**changes, "callbacks": {"kill": kill}}), tmp_path, ["--max-restarts", "1"]
    )
    assert result.returncode == 0, result.stderr
    started = [event for event in read_events(tmp_path / "parity") if event["kind"] == "started"]
    # The checkpoint of step 4 may not have been complete.
    assert [(event["ranks"], event["step"]) for event in started] in ([(2, 0), (2, 4)], [(2, 0), (2, 2)])
    undisturbed = train_until(make_trainer(small_run(text, tmp_path / "alone", changes)), 8)
    records = [record for record in read_metrics(tmp_path / "parity") if "loss" in record]
    assert [(record["loss"], record["grad_norm"]) for record in records] == [
        pytest.approx(step, rel=1e-10) for step in undisturbed
    ]


def test_torchrun_prints_user_error_once(text: Path, tmp_path: Path) -> None:
    changes = {"training.tokens_per_step": 3 * 32, "layout.data_parallel": "zero3"}
    result = run_torchrun(small_run(text, tmp_path, changes), tmp_path)
    assert result.returncode == 1, "torchrun's own, for ranks that exit with 2"
    assert (
        result.stderr.count("phalanx: [rank 0] training.tokens_per_step = 96") == result.stderr.count("phalanx: ") == 1
    )
    # The only traceback is torchrun's.
    assert result.stderr.count("Traceback (most recent call last)") == 1


def test_rank_that_creates_fp8_run_rejects_gpu_without_float8_products(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = {**DENSE, "hidden_size": 64}
    run = small_run(text, tmp_path, {"model": model, "training.precision": "fp8", "training.steps": 1})
    run_file = tmp_path / "run.toml"
    run_file.write_text(to_toml(run))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(process, "query_gpus", lambda _: [8.0])
    assert worker.run_rank(run_file, RankOptions(resume=False, device="cpu", force=True)) == 2
    assert "requires compute capability 9.0 or above, and a GPU of this machine has 8.0" in capsys.readouterr().err


def test_rank_chooses_recomputation_once_for_ranks_of_its_machine(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = {"activation_checkpointing": "auto", "micro_batch_size": 1}
    run_file = tmp_path / "file.toml"
    changes = {"layout": layout, "training.steps": 1, "optimizer.warmup_steps": 0, "cluster": {"device": "cpu"}}
    run_file.write_text(to_toml(small_run(text, tmp_path, changes)))
    resolve, local_ranks = create_run.resolve_recomputation, []

    def record(run: RunSpec, world_size: int, gpu_memory_bytes: int | None, nproc: int | None = None) -> RunSpec:
        local_ranks.append(nproc)
        return resolve(run, world_size, gpu_memory_bytes, nproc)

    monkeypatch.setattr(create_run, "resolve_recomputation", record)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert worker.run_rank(run_file, RankOptions(resume=False)) == 0
    assert local_ranks == [3]


@pytest.fixture(scope="module")
def complete_run(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file of a complete run of four steps with two checkpoints, next to its directory."""
    folder = tmp_path_factory.mktemp("complete")
    run = small_run(text, folder, {"training.steps": 4, "checkpoint": {"every": 2, "keep": {"last": 3}}})
    file = folder / "run.toml"
    file.write_text(to_toml(run))
    assert worker.run_rank(file, RankOptions()) == 0
    return file


def copied_directory(complete_run: Path, folder: Path) -> Path:
    return Path(shutil.copytree(complete_run.parent / "parity", folder / "copy"))


def started_steps(directory: Path) -> list[int]:
    return [event["step"] for event in read_events(directory) if event["kind"] == "started"]


def test_copy_of_complete_run_continues_from_its_own_checkpoint(complete_run: Path, tmp_path: Path) -> None:
    directory = copied_directory(complete_run, tmp_path)
    shutil.rmtree(directory / "checkpoints" / "step-00000004")
    assert worker.run_rank(directory, RankOptions()) == 0
    assert started_steps(directory) == [0, 2]


def test_rank_goes_back_in_no_directory_that_is_training(
    complete_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = copied_directory(complete_run, tmp_path)
    with acquire_run_lock(directory):
        assert worker.run_rank(directory, RankOptions(step=2)) == 2
    assert "fix: wait until the process exits" in capsys.readouterr().err
    assert (directory / "checkpoints" / "step-00000004").is_dir()
    assert worker.run_rank(directory, RankOptions(step=2)) == 0
    assert started_steps(directory) == [0, 2]


def test_rank_rejects_another_step_than_that_of_the_path(
    complete_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = complete_run.parent / "parity" / "checkpoints" / "step-4"
    assert worker.run_rank(checkpoint, RankOptions(step=2)) == 2
    assert capsys.readouterr().err.startswith("phalanx: --step = 2 is not the step of")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


SLOW_READER = """
import time
from torch._C._distributed_c10d import Store
from phalanx.train.__main__ import main
wait = Store.wait
Store.wait = lambda *arguments: (wait(*arguments), time.sleep(1.0))
main()
"""
"""A rank that reads what rank 0 has prepared a second later."""


def test_ranks_of_complete_run_end_without_error_if_rank_0_has_the_store(complete_run: Path) -> None:
    port = str(free_port())
    ranks = []
    for rank, program in enumerate((["-m", "phalanx.train"], ["-c", SLOW_READER])):
        variables = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
        environment = {**os.environ, **variables, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        command = [sys.executable, *program, str(complete_run), "--resume"]
        ranks.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment))
    outputs = [process.communicate(timeout=180)[1] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], outputs
    assert [output.count("the run is complete: step 4 is its last") for output in outputs] == [1, 0]

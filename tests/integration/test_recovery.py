"""Real runs whose processes are killed, stopped and restarted, compared with an uninterrupted run."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from phalanx.runs.checkpoints import checkpoints
from phalanx.runs.metrics import read_metrics
from phalanx.spec.errors import EXIT_STOPPED
from phalanx.spec.files.load import LAYOUT_FILE
from phalanx.testing.processes import WAIT_SECONDS, rank_pids, run_python, wait_until, warm_process_pid
from tests.helpers.small_runs import make_trainer, small_run, train_until
from tests.helpers.training_processes import (
    LONG,
    SHORT,
    STEPS,
    events_of_kind,
    has_reached_step,
    recorded_losses,
    training_run,
)


@pytest.fixture(scope="module")
def uninterrupted(text: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[float, float]]:
    """Loss and gradient norm of every step of a run without failures."""
    folder = tmp_path_factory.mktemp("whole")
    with training_run(text, folder, SHORT) as process:
        _, stderr = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == 0, stderr
    return recorded_losses(folder / "parity")


@pytest.mark.parametrize("sent_signal", [signal.SIGKILL, signal.SIGSEGV])
def test_recovery_restarts_killed_rank_with_bit_exact_losses(
    sent_signal: signal.Signals, uninterrupted: list[tuple[float, float]], text: Path, tmp_path: Path
) -> None:
    directory = tmp_path / "parity"
    with training_run(text, tmp_path, SHORT) as process:
        wait_until(lambda: checkpoints(directory / "checkpoints"), "a checkpoint")
        os.kill(rank_pids(directory)[1], sent_signal)
        _, stderr = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == 0, stderr
    assert f"rank 1 was killed by {sent_signal.name}" in stderr
    assert "restarting from step-" in stderr
    (failed,), (first, restarted) = events_of_kind(directory, "failed"), events_of_kind(directory, "started")
    assert (failed["rank"], first["step"]) == (1, 0)
    assert 0 <= failed["step"] - restarted["step"] <= 5
    assert recorded_losses(directory) == uninterrupted


def test_recovery_continues_bit_exact_without_warm_process(
    uninterrupted: list[tuple[float, float]], text: Path, tmp_path: Path
) -> None:
    directory = tmp_path / "parity"
    with training_run(text, tmp_path, SHORT) as process:
        wait_until(lambda: checkpoints(directory / "checkpoints"), "a checkpoint")
        os.kill(warm_process_pid(process.pid), signal.SIGKILL)
        os.kill(rank_pids(directory)[1], signal.SIGKILL)
        _, stderr = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == 0, stderr
    assert "the warm process has exited; starting ranks without it" in stderr
    assert recorded_losses(directory) == uninterrupted


def test_recovery_restarts_rank_stopped_by_sigstop(
    uninterrupted: list[tuple[float, float]], text: Path, tmp_path: Path
) -> None:
    """A stopped rank does not exit; the others notice it by the timeout of their collectives."""
    directory = tmp_path / "parity"
    with training_run(text, tmp_path, {**SHORT, "training.collective_timeout_seconds": 3}) as process:
        wait_until(lambda: checkpoints(directory / "checkpoints"), "a checkpoint")
        os.kill(rank_pids(directory)[1], signal.SIGSTOP)
        _, stderr = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == 0, stderr
    assert "restarting from step-" in stderr
    assert recorded_losses(directory) == uninterrupted


@pytest.mark.parametrize("target", ["the launcher", "a rank"])
def test_sigterm_to_launcher_or_rank_saves_checkpoint_and_stops_run(target: str, text: Path, tmp_path: Path) -> None:
    """The lock file contains the launcher's process id, which a second launcher reports."""
    directory = tmp_path / "parity"
    with training_run(text, tmp_path, LONG) as process:
        wait_until(has_reached_step(directory, 3), "step 3")
        assert (directory / "lock").read_text().split()[0] == str(process.pid)
        os.kill(process.pid if target == "the launcher" else rank_pids(directory)[1], signal.SIGTERM)
        _, stderr = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == EXIT_STOPPED, stderr
    last = read_metrics(directory)[-1]["step"]
    assert checkpoints(directory / "checkpoints")[0].name == f"step-{last:08d}"
    assert not events_of_kind(directory, "failed")


def test_run_directory_stays_locked_while_ranks_restart(text: Path, tmp_path: Path) -> None:
    """The launcher holds the lock while its ranks are gone, so a second launcher cannot change the run file."""
    directory = tmp_path / "parity"
    with training_run(text, tmp_path, {**LONG, "training.steps": 400}) as process:
        wait_until(lambda: checkpoints(directory / "checkpoints"), "a checkpoint")
        run_file_text = (directory / "run.toml").read_text()
        assert "nproc_per_node = 2" in run_file_text, "for the next start"
        os.kill(rank_pids(directory)[1], signal.SIGKILL)
        command = [sys.executable, "-m", "phalanx", "train", str(directory), "--resume"]
        command += ["--set", "optimizer.learning_rate=1"]
        refused = run_python(command, text=True, timeout=WAIT_SECONDS)
        assert refused.returncode == 2, refused.stderr
        assert f"is in use by process {process.pid} on" in refused.stderr
        assert (directory / "run.toml").read_text() == run_file_text
        wait_until(lambda: len(events_of_kind(directory, "started")) == 2, "ranks start again")
        process.terminate()
        assert process.wait(timeout=WAIT_SECONDS) == EXIT_STOPPED


def test_sigterm_before_first_step_stops_run_without_checkpoint(text: Path, tmp_path: Path) -> None:
    directory = tmp_path / "parity"
    with training_run(text, tmp_path, LONG) as process:
        wait_until((directory / "run.toml").exists, "ranks are about to start")
        process.terminate()
        _, stderr = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == EXIT_STOPPED, stderr
    assert "no new checkpoint was saved" in stderr
    assert not checkpoints(directory / "checkpoints")


def test_run_lock_admits_one_of_two_simultaneous_launchers(text: Path, tmp_path: Path) -> None:
    with training_run(text, tmp_path, SHORT) as first, training_run(text, tmp_path, SHORT) as second:
        stderrs = [process.communicate(timeout=WAIT_SECONDS)[1] for process in (first, second)]
    codes = [first.returncode, second.returncode]
    assert sorted(codes) == [0, 2], stderrs
    assert re.search("is in use by process|belongs to a run", stderrs[codes.index(2)])
    assert len(events_of_kind(tmp_path / "parity", "started")) == 1


@contextmanager
def killing_ranks(directory: Path, is_target: Callable[[int], bool]) -> Iterator[None]:
    """Kill these ranks whenever they start."""
    stop_event = threading.Event()

    def kill() -> None:
        while not stop_event.wait(0.05):
            for rank, process in rank_pids(directory).items():
                if is_target(rank):
                    with suppress(ProcessLookupError):
                        os.kill(process, signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield
    finally:
        stop_event.set()
        thread.join()


def test_recovery_drops_rank_that_fails_repeatedly(text: Path, tmp_path: Path) -> None:
    """The planner finds a layout for the other two ranks, and losses equal those of a single process."""
    directory, changes = tmp_path / "parity", {**SHORT, "recovery.max_restarts": 1}
    with training_run(text, tmp_path, changes, 3) as process:
        wait_until(lambda: checkpoints(directory / "checkpoints"), "a checkpoint")
        with killing_ranks(directory, lambda rank: rank == 2):
            _, stderr = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == 0, stderr
    assert "rank 2 failed repeatedly; continuing without it on 2 of 3 ranks" in stderr, stderr
    assert " with: phalanx train" not in stderr, "there is nothing to do"
    assert [event["rank"] for event in events_of_kind(directory, "failed")] == [2, 2], stderr
    assert [event["ranks"] for event in events_of_kind(directory, "started")] == [3, 2]
    assert (directory / LAYOUT_FILE).exists()
    single_process = train_until(make_trainer(small_run(text, tmp_path / "one", SHORT)), STEPS)
    assert recorded_losses(directory) == [pytest.approx(step, rel=1e-10) for step in single_process]


def test_recovery_gives_up_when_every_start_fails(text: Path, tmp_path: Path) -> None:
    """Rank 0 fails with fewer ranks too: restarts have a limit."""
    directory, changes = tmp_path / "parity", {**SHORT, "recovery.max_restarts": 1}
    with killing_ranks(directory, lambda rank: rank == 0), training_run(text, tmp_path, changes) as process:
        _, stderr = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == 1
    assert stderr.count("rank 0 was killed by SIGKILL") == 4
    assert f"there is no checkpoint yet; start over with: phalanx train {directory} --resume" in stderr


def test_recovery_does_not_restart_after_divergence(text: Path, tmp_path: Path) -> None:
    """The loss is not finite: all ranks roll back together, as often as is allowed."""
    changes = {**SHORT, "optimizer.learning_rate": 1e30, "optimizer.max_grad_norm": 0.0, "optimizer.name": "sgd"}
    with training_run(text, tmp_path, {**changes, "recovery.max_rollbacks": 1}) as process:
        _, stderr = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == 1
    assert "restarting from" not in stderr
    assert stderr.count("rolling back to step 0") == 1  # no checkpoint was saved
    assert stderr.count("not finite") == 2

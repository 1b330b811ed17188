"""Faults that a run survives, or at which it ends with a clear error: full disks, damaged checkpoints, slow ranks, a
killed launcher."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from phalanx.launch.warm_process import process_state
from phalanx.runs.checkpoints import checkpoints, find_damage, step_of
from phalanx.spec.errors import EXIT_STOPPED
from phalanx.spec.files.load import run_from_table
from phalanx.spec.files.write import to_toml
from phalanx.testing.fault_injection import NotAllowed, fill_disk, flip_bit, small_disk, truncate_file
from phalanx.testing.processes import WAIT_SECONDS, rank_pids, start_python, wait_until
from tests.helpers.small_runs import small_run
from tests.helpers.training_processes import (
    LONG,
    events_of_kind,
    has_reached_step,
    recorded_losses,
    single_process_losses,
    training_run,
)

TEXT = Path(json.__file__).parent


def stop_gracefully(process: subprocess.Popen[str]) -> str:
    """Stop a run by SIGTERM, and return its stderr."""
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == EXIT_STOPPED, stderr
    return stderr


# -- a full disk ------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk_path(tmp_path: Path) -> Iterator[Path]:
    """A mounted disk of 64 MiB."""
    path = tmp_path / "disk"
    try:
        with small_disk(path, 64 * 2**20):
            yield path
    except NotAllowed as not_allowed:
        pytest.skip(str(not_allowed))


def test_full_disk_stops_run_and_resume_continues_when_space_is_freed(small_disk_path: Path, tmp_path: Path) -> None:
    """The run is not restarted, because the same write would fail again."""
    directory, changes = small_disk_path / "parity", {**LONG, "recovery.max_restarts": 3}
    with training_run(TEXT, small_disk_path, changes, 2) as process:
        wait_until(lambda: checkpoints(directory / "checkpoints"), "it saves")
        filler = fill_disk(small_disk_path, spare_bytes=300_000)
        newest = step_of(checkpoints(directory / "checkpoints")[0])
        _, stderr = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == 2, stderr
    assert "restarting from" not in stderr
    assert "No space left on device" in stderr
    assert "free space" in stderr
    assert "Traceback" not in stderr
    saved = checkpoints(directory / "checkpoints")
    assert [find_damage(checkpoint) for checkpoint in saved] == [None] * len(saved)
    assert step_of(saved[0]) >= newest

    filler.unlink()
    num_starts = len(events_of_kind(directory, "started"))
    with training_run(TEXT, small_disk_path, changes, 2, "--resume") as process:
        wait_until(lambda: len(events_of_kind(directory, "started")) > num_starts, "it continues")
        stop_gracefully(process)
    losses = recorded_losses(directory)
    assert losses == single_process_losses(tmp_path, changes, len(losses))


def test_full_disk_fails_run_without_checkpoints(small_disk_path: Path) -> None:
    directory, changes = small_disk_path / "parity", {**LONG, "checkpoint.every": 10**6, "recovery.max_restarts": 3}
    with training_run(TEXT, small_disk_path, changes, 2) as process:
        wait_until(has_reached_step(directory, 3), "it trains")
        fill_disk(small_disk_path)
        _, stderr = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == 2, stderr
    assert "restarting from" not in stderr
    assert f"; {directory} is not writable: No space left on device. Free space" in stderr
    assert "Traceback" not in stderr


# -- damaged checkpoints ----------------------------------------------------------------------------------------------


def test_restart_uses_previous_checkpoint_when_latest_is_damaged(tmp_path: Path) -> None:
    """The newest checkpoint is damaged in three ways while its ranks are stopped."""
    directory, changes = tmp_path / "parity", {**LONG, "checkpoint.keep": 3}
    with training_run(TEXT, tmp_path, changes) as process:
        for number, damage in enumerate((truncate_file, flip_bit, Path.unlink), 1):
            wait_until(lambda at=number: len(events_of_kind(directory, "started")) == at, "it trains")  # type: ignore[misc]
            start_step = events_of_kind(directory, "started")[-1]["step"]
            wait_until(lambda after=start_step: num_checkpoints_after(directory, after) > 1, "two checkpoints")  # type: ignore[misc]
            ranks = rank_pids(directory)
            for pid in ranks.values():
                os.kill(pid, signal.SIGSTOP)
            newest, previous, *_ = checkpoints(directory / "checkpoints")
            damage(next(newest.glob("shard-*")))
            for pid in ranks.values():
                os.kill(pid, signal.SIGKILL)
            wait_until(lambda at=number: len(events_of_kind(directory, "started")) > at, "it trains again")  # type: ignore[misc]
            assert events_of_kind(directory, "started")[-1]["step"] == step_of(previous)
            assert newest.with_name(f"{newest.name}.damaged").exists()
        wait_until(has_reached_step(directory, step_of(previous) + 5), "it continues")
        stderr = stop_gracefully(process)
    assert stderr.count("is damaged and was quarantined") == 3
    assert len(events_of_kind(directory, "checkpoint_quarantined")) == 3
    losses = recorded_losses(directory)
    assert losses == single_process_losses(tmp_path, changes, len(losses))


def num_checkpoints_after(directory: Path, step: int) -> int:
    """Return the number of checkpoints of later steps."""
    return sum(step_of(path) > step for path in checkpoints(directory / "checkpoints"))


# -- slow ranks -------------------------------------------------------------------------------------------------------


def test_rank_stalled_below_collective_timeout_is_not_restarted(tmp_path: Path) -> None:
    directory, changes = tmp_path / "parity", {**LONG, "training.collective_timeout_seconds": 10}
    with training_run(TEXT, tmp_path, changes) as process:
        wait_until(has_reached_step(directory, 1), "it trains")
        slow_pid = rank_pids(directory)[1]
        for _ in range(8):
            os.kill(slow_pid, signal.SIGSTOP)
            num_steps = len(recorded_losses(directory))
            time.sleep(0.4)
            assert len(recorded_losses(directory)) <= num_steps + 1
            os.kill(slow_pid, signal.SIGCONT)
            wait_until(has_reached_step(directory, num_steps + 3), "it continues")
        assert rank_pids(directory)[1] == slow_pid
        stop_gracefully(process)
    assert events_of_kind(directory, "failed") == []
    losses = recorded_losses(directory)
    assert losses == single_process_losses(tmp_path, changes, len(losses))


# -- the launcher -----------------------------------------------------------------------------------------------------


def launched_processes(launcher: int) -> list[int]:
    """Return the processes that a launcher has started, and their descendants."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            _, parent = process_state(folder)
            children.setdefault(parent, []).append(int(folder.name))
    pids = [launcher]
    for pid in pids:
        pids += children.get(pid, [])
    return pids[1:]


def is_running(pid: int) -> bool:
    with suppress(OSError):
        return process_state(Path(f"/proc/{pid}"))[0] not in "ZX"
    return False


def listening_ports(pids: list[int]) -> set[str]:
    """Return the ports at which these processes listen."""
    sockets = set()
    for pid in pids:
        for handle in Path(f"/proc/{pid}/fd").glob("*"):
            with suppress(OSError):
                sockets.add(os.readlink(handle))
    return {port for port, name in listening_sockets() if name in sockets}


def listening_sockets() -> Iterator[tuple[str, str]]:
    """Yield the ports at which any process listens, with their sockets."""
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A":
                yield words[1], f"socket:[{words[9]}]"


def shared_memory_files(pids: list[int]) -> set[str]:
    """Return the files of shared memory that these processes have mapped."""
    lines = {line.split()[-1] for pid in pids for line in Path(f"/proc/{pid}/maps").read_text().splitlines()}
    return {name for name in lines if name.startswith("/dev/shm/")}


@pytest.fixture
def temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of temporary files, which processes must remove."""
    directory = tmp_path / "temporary"
    directory.mkdir()
    monkeypatch.setenv("TMPDIR", str(directory))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))  # PyTorch's own, which stays
    return directory


@pytest.mark.parametrize("when", ["trains", "begins"])
def test_killed_launcher_leaves_no_processes_ports_or_files(
    when: str, temporary_directory: Path, tmp_path: Path
) -> None:
    directory = tmp_path / "parity"
    with training_run(TEXT, tmp_path, LONG) as process:
        wait_until(
            has_reached_step(directory, 3) if when == "trains" else lambda: len(rank_pids(directory)) == 2, f"it {when}"
        )
        descendants = launched_processes(process.pid)
        assert len(descendants) >= 2
        ports, files = listening_ports([process.pid, *descendants]), shared_memory_files([process.pid, *descendants])
        assert ports
        process.kill()
        process.wait(timeout=WAIT_SECONDS)
        wait_until(lambda: not any(map(is_running, descendants)), "no process is left")
        wait_until(lambda: not ports & {port for port, _ in listening_sockets()}, "nobody listens any longer")
        assert [name for name in files if Path(name).exists()] == []
        assert list(temporary_directory.iterdir()) == []


@pytest.mark.parametrize("when", ["at once", "when ranks are there"])
def test_sigterm_during_restart_stops_run(when: str, temporary_directory: Path, tmp_path: Path) -> None:
    directory = tmp_path / "parity"
    with training_run(TEXT, tmp_path, LONG) as process:
        wait_until(lambda: checkpoints(directory / "checkpoints"), "a checkpoint")
        before = set(rank_pids(directory).values())
        os.kill(max(before), signal.SIGKILL)
        wait_until(lambda: events_of_kind(directory, "failed"), "the failure is noted")
        if when == "when ranks are there":
            wait_until(lambda: set(rank_pids(directory).values()) - before, "new ranks")
        descendants = launched_processes(process.pid)
        stderr = stop_gracefully(process)
        assert "Traceback" not in stderr
        wait_until(lambda: not any(map(is_running, descendants)), "no process is left")
        assert not rank_pids(directory)
        assert list(temporary_directory.iterdir()) == []


def test_sigterm_during_rendezvous_stops_run(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        to_toml(small_run(TEXT, tmp_path, {**LONG, "recovery": {"rendezvous_timeout_seconds": WAIT_SECONDS}}))
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "phalanx", "train", str(file), "--nproc", "2"]
    rendezvous_options = ["--nodes", "2", "--rendezvous", f"127.0.0.1:{port}"]
    with start_python([*command, *rendezvous_options], stderr=subprocess.PIPE, text=True) as process:
        wait_until(lambda: any(name.endswith(f":{port:04X}") for name, _ in listening_sockets()), "it waits")
        stderr = stop_gracefully(process)
    assert "Traceback" not in stderr


def test_sigterm_during_data_preparation_stops_run(tmp_path: Path) -> None:
    file, cache = tmp_path / "run.toml", tmp_path / "cache"
    data = {"train": ["stdlib"], "tokenizer": "bpe", "cache": str(cache)}
    file.write_text(to_toml(run_from_table({"output_dir": str(tmp_path), "model": {"preset": "tiny"}, "data": data})))
    command = [sys.executable, "-m", "phalanx", "train", str(file), "--nproc", "2"]
    with start_python(command, stderr=subprocess.PIPE, text=True) as process:
        wait_until(cache.exists, "it prepares text")
        stop_gracefully(process)
    assert not (tmp_path / "run").exists()

"""What a run outlives, or ends at in order: full disks, damaged checkpoints, slow ranks, a launcher that is killed."""

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
    """End a run in order; returns what it said."""
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == EXIT_STOPPED, said
    return said


# -- a full disk ------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk_path(tmp_path: Path) -> Iterator[Path]:
    """A small one."""
    place = tmp_path / "disk"
    try:
        with small_disk(place, 64 * 2**20):
            yield place
    except NotAllowed as not_allowed:
        pytest.skip(str(not_allowed))


def test_full_disk_stops_run_and_resume_continues_when_space_is_freed(small_disk_path: Path, tmp_path: Path) -> None:
    """At once: whatever is the first thing that does not fit would not fit again."""
    directory, changes = small_disk_path / "parity", {**LONG, "recovery.max_restarts": 3}
    with training_run(TEXT, small_disk_path, changes, 2) as process:
        wait_until(lambda: checkpoints(directory / "checkpoints"), "it saves")
        others = fill_disk(small_disk_path, spare_bytes=300_000)
        newest = step_of(checkpoints(directory / "checkpoints")[0])
        _, said = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == 2, said
    assert "restarting from" not in said
    assert "No space left on device" in said
    assert "free space" in said
    saved = checkpoints(directory / "checkpoints")
    assert [find_damage(checkpoint) for checkpoint in saved] == [None] * len(saved)
    assert step_of(saved[0]) >= newest

    others.unlink()
    begun = len(events_of_kind(directory, "started"))
    with training_run(TEXT, small_disk_path, changes, 2, "--resume") as process:
        wait_until(lambda: len(events_of_kind(directory, "started")) > begun, "it continues")
        stop_gracefully(process)
    learned = recorded_losses(directory)
    assert learned == single_process_losses(tmp_path, changes, len(learned))


def test_full_disk_fails_run_without_checkpoints(small_disk_path: Path) -> None:
    directory, changes = small_disk_path / "parity", {**LONG, "checkpoint.every": 10**6, "recovery.max_restarts": 3}
    with training_run(TEXT, small_disk_path, changes, 2) as process:
        wait_until(has_reached_step(directory, 3), "it trains")
        fill_disk(small_disk_path)
        _, said = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == 2, said
    assert "restarting from" not in said
    assert f"; {directory} is not writable: No space left on device. Free space" in said


# -- damaged checkpoints ----------------------------------------------------------------------------------------------


def test_restart_uses_previous_checkpoint_when_latest_is_damaged(tmp_path: Path) -> None:
    """By itself, however the newest was damaged while its ranks were killed."""
    directory, changes = tmp_path / "parity", {**LONG, "checkpoint.keep": 3}
    with training_run(TEXT, tmp_path, changes) as process:
        for number, harm in enumerate((truncate_file, flip_bit, Path.unlink), 1):
            wait_until(lambda at=number: len(events_of_kind(directory, "started")) == at, "it trains")  # type: ignore[misc]
            began = events_of_kind(directory, "started")[-1]["step"]
            wait_until(lambda after=began: num_checkpoints_after(directory, after) > 1, "two checkpoints")  # type: ignore[misc]
            ranks = rank_pids(directory)
            for pid in ranks.values():
                os.kill(pid, signal.SIGSTOP)
            newest, before, *_ = checkpoints(directory / "checkpoints")
            harm(next(newest.glob("shard-*")))
            for pid in ranks.values():
                os.kill(pid, signal.SIGKILL)
            wait_until(lambda at=number: len(events_of_kind(directory, "started")) > at, "it trains again")  # type: ignore[misc]
            assert events_of_kind(directory, "started")[-1]["step"] == step_of(before)
            assert newest.with_name(f"{newest.name}.damaged").exists()
        wait_until(has_reached_step(directory, step_of(before) + 5), "it continues")
        said = stop_gracefully(process)
    assert said.count("is damaged and was quarantined") == len(events_of_kind(directory, "checkpoint_quarantined")) == 3
    learned = recorded_losses(directory)
    assert learned == single_process_losses(tmp_path, changes, len(learned))


def num_checkpoints_after(directory: Path, step: int) -> int:
    """How many checkpoints there are of later steps."""
    return sum(step_of(each) > step for each in checkpoints(directory / "checkpoints"))


# -- slow ranks -------------------------------------------------------------------------------------------------------


def test_rank_stalled_below_collective_timeout_is_not_restarted(tmp_path: Path) -> None:
    """A rank that stalls repeatedly, each time for less than the timeout of collectives."""
    directory, changes = tmp_path / "parity", {**LONG, "training.collective_timeout_seconds": 10}
    with training_run(TEXT, tmp_path, changes) as process:
        wait_until(has_reached_step(directory, 1), "it trains")
        slow = rank_pids(directory)[1]
        for _ in range(8):
            os.kill(slow, signal.SIGSTOP)
            stands = len(recorded_losses(directory))
            time.sleep(0.4)
            assert len(recorded_losses(directory)) <= stands + 1
            os.kill(slow, signal.SIGCONT)
            wait_until(has_reached_step(directory, stands + 3), "it continues")
        assert rank_pids(directory)[1] == slow
        stop_gracefully(process)
    assert events_of_kind(directory, "failed") == []
    learned = recorded_losses(directory)
    assert learned == single_process_losses(tmp_path, changes, len(learned))


# -- the launcher -----------------------------------------------------------------------------------------------------


def launched_processes(launcher: int) -> list[int]:
    """The processes that a launcher has started, and theirs."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            _, parent = process_state(folder)
            children.setdefault(parent, []).append(int(folder.name))
    found = [launcher]
    for pid in found:
        found += children.get(pid, [])
    return found[1:]


def is_running(pid: int) -> bool:
    with suppress(OSError):
        return process_state(Path(f"/proc/{pid}"))[0] not in "ZX"
    return False


def listening_ports(pids: list[int]) -> set[str]:
    """The ports at which processes listen."""
    sockets = set()
    for pid in pids:
        for handle in Path(f"/proc/{pid}/fd").glob("*"):
            with suppress(OSError):
                sockets.add(os.readlink(handle))
    return {port for port, name in listening_sockets() if name in sockets}


def listening_sockets() -> Iterator[tuple[str, str]]:
    """Ports at which anybody listens, with their sockets."""
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A":
                yield words[1], f"socket:[{words[9]}]"


def shared_memory_files(pids: list[int]) -> set[str]:
    """Files of shared memory that processes have."""
    lines = {line.split()[-1] for pid in pids for line in Path(f"/proc/{pid}/maps").read_text().splitlines()}
    return {name for name in lines if name.startswith("/dev/shm/")}


@pytest.fixture
def temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where processes put what they mean to take away."""
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setenv("TMPDIR", str(place))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))  # PyTorch's own, which is to stay
    return place


@pytest.mark.parametrize("when", ["trains", "begins"])
def test_killed_launcher_leaves_no_processes_ports_or_files(
    when: str, temporary_directory: Path, tmp_path: Path
) -> None:
    directory = tmp_path / "parity"
    with training_run(TEXT, tmp_path, LONG) as process:
        wait_until(
            has_reached_step(directory, 3) if when == "trains" else lambda: len(rank_pids(directory)) == 2, f"it {when}"
        )
        left = launched_processes(process.pid)
        assert len(left) >= 2
        taken, files = listening_ports([process.pid, *left]), shared_memory_files([process.pid, *left])
        assert taken
        process.kill()
        process.wait(timeout=WAIT_SECONDS)
        wait_until(lambda: not any(map(is_running, left)), "no process is left")
        wait_until(lambda: not taken & {port for port, _ in listening_sockets()}, "nobody listens any longer")
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
        left = launched_processes(process.pid)
        said = stop_gracefully(process)
        assert "Traceback" not in said
        wait_until(lambda: not any(map(is_running, left)), "no process is left")
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
    meeting = ["--nodes", "2", "--rendezvous", f"127.0.0.1:{port}"]
    with start_python([*command, *meeting], stderr=subprocess.PIPE, text=True) as process:
        wait_until(lambda: any(name.endswith(f":{port:04X}") for name, _ in listening_sockets()), "it waits")
        said = stop_gracefully(process)
    assert "Traceback" not in said


def test_sigterm_during_data_preparation_stops_run(tmp_path: Path) -> None:
    file, cache = tmp_path / "run.toml", tmp_path / "cache"
    data = {"train": ["stdlib"], "tokenizer": "bpe", "cache": str(cache)}
    file.write_text(to_toml(run_from_table({"output_dir": str(tmp_path), "model": {"preset": "tiny"}, "data": data})))
    command = [sys.executable, "-m", "phalanx", "train", str(file), "--nproc", "2"]
    with start_python(command, stderr=subprocess.PIPE, text=True) as process:
        wait_until(cache.exists, "it prepares text")
        stop_gracefully(process)
    assert not (tmp_path / "run").exists()

"""A process that has imported what ranks need, and starts them by forking."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from phalanx.launch.rank_processes import RankStarter
from phalanx.launch.warm_process import ForkedProcess, WarmProcess, WarmProcessError
from phalanx.testing.fault_injection import NotAllowed, memory_limited

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def warm_process() -> Iterator[WarmProcess]:
    process = WarmProcess(["json"])
    yield process
    process.close()


def describe_child(
    start: Callable[..., subprocess.Popen[str]], mode: str, folder: Path, **variables: str
) -> tuple[Any, ...]:
    """Start a process; return its description of its start, what it wrote to a file that it was given, its last words
    on stderr, and its exit code."""
    reading_end, writing_end = os.pipe()
    command = [sys.executable, "-m", "tests.helpers.described_process", str(writing_end), mode]
    (folder / "stdin").write_text("from the parent")
    with (folder / "stdin").open() as stdin:
        process = start(
            command,
            pass_fds=[writing_end],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "MARK": "here", **variables},
            start_new_session=True,
        )
    os.close(writing_end)
    stdout, stderr = process.communicate(timeout=60)
    with open(reading_end) as file:
        return json.loads(stdout), file.read(), stderr.splitlines()[-1:], process.returncode


@pytest.mark.parametrize("mode", ["0", "75", "message", "error"])
def test_forked_process_starts_and_ends_like_new_one(warm_process: WarmProcess, mode: str, tmp_path: Path) -> None:
    """The comparison includes arguments, environment, directory, session, parent, command line, files, signals, exit
    code and last words."""
    variables = {"PYTHONUNBUFFERED": "1" if mode == "0" else ""}
    description, *ending = describe_child(partial(ForkedProcess, warm_process), mode, tmp_path, **variables)
    expected_description, *expected_ending = describe_child(subprocess.Popen, mode, tmp_path, **variables)
    for actual, expected in zip(description.items(), expected_description.items(), strict=True):
        assert actual == expected
    assert ending == expected_ending
    assert description["mark"] == "here"


def test_forked_process_ignores_what_its_parent_ignores(warm_process: WarmProcess, tmp_path: Path) -> None:
    """nohup makes a launcher ignore SIGHUP."""
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        description, *_ = describe_child(partial(ForkedProcess, warm_process), "0", tmp_path)
    finally:
        signal.signal(signal.SIGHUP, previous)
    assert description["hangup"] == str(signal.SIG_IGN)


def test_forked_process_forks_its_own_warm_process(warm_process: WarmProcess) -> None:
    """A launcher that was forked has all imports, and does not load them again."""
    command = [sys.executable, "-m", "tests.helpers.described_process", "fork"]
    process = ForkedProcess(warm_process, command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    stdout, _ = process.communicate(timeout=60)
    assert (stdout, process.returncode) == ("True\n[]\n", 0)


def test_warm_process_that_cannot_import_is_reported() -> None:
    process = WarmProcess(["phalanx.no_such_module"])
    with pytest.raises(WarmProcessError, match="has exited"):
        ForkedProcess(process, [sys.executable, "-m", "json.tool"])
    process.close()


def test_warm_process_that_has_touched_gpu_is_not_used() -> None:
    """A GPU cannot be used by forks of a process that has used it (torch.cuda)."""
    process = WarmProcess(["tests.helpers.touched_gpu"])
    with pytest.raises(WarmProcessError, match="has already used a GPU"):
        ForkedProcess(process, [sys.executable, "-m", "json.tool"])
    process.close()


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(("fault", "message"), [(kill, "has exited"), (stop, "did not answer within 1 s")])
def test_ranks_start_without_warm_process_that_fails(
    fault: Callable[[int], None], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("phalanx.launch.warm_process.FORK_SECONDS", 1)
    starter = RankStarter(WarmProcess(["json"]))
    environment = {"RANK": "0"}
    assert starter.start(["json.tool", os.devnull], environment).wait(timeout=60) == 1  # no JSON
    fault(starter.warm_process.pid)
    for _ in range(2):
        assert starter.start(["json.tool", os.devnull], environment).wait(timeout=60) == 1
    assert capsys.readouterr().err == f"phalanx: the warm process {message}; starting ranks without it\n"


def test_ranks_start_without_warm_process_that_has_no_memory_to_fork(capsys: pytest.CaptureFixture[str]) -> None:
    warm_process, environment = WarmProcess(["json"]), {"RANK": "0"}
    starter = RankStarter(warm_process)
    try:
        with memory_limited(2**14) as join:
            assert starter.start(["json.tool", os.devnull], environment).wait(timeout=60) == 1
            join(warm_process.pid)
            assert starter.start(["json.tool", os.devnull], environment).wait(timeout=60) == 1
    except NotAllowed as not_allowed:
        pytest.skip(str(not_allowed))
    finally:
        warm_process.close()
    assert re.fullmatch(r"phalanx: the warm process .*; starting ranks without it\n", capsys.readouterr().err)


def test_working_directory_provides_no_module_to_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be someone else's run directory; components of the user are found there once they are imported."""
    for name in ("json", "socket", "argparse", "torch", "phalanx"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'code ran')!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    warm = WarmProcess(["json"])
    try:
        for warm_process in (warm, None):
            rank = RankStarter(warm_process).start(["json.tool", "--help"], {"RANK": "0"})
            assert rank.wait(timeout=60) == 0
    finally:
        warm.close()
    assert not (tmp_path / "code ran").exists()

"""Messages of processes of Phalanx, and of Phalanx as a library."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx.spec.errors import UserError
from phalanx.spec.log import PROGRESS, RESULT, level_name, log_to_stderr, parse_levels
from phalanx.testing.processes import run_python


@pytest.fixture(autouse=True)
def _restore_levels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        yield
        patch.delenv("PHALANX_LOG", raising=False)
        log_to_stderr()


def log_one_of_each() -> None:
    logger = logging.getLogger("phalanx.launch.supervisor")
    logger.debug("detail")
    logger.info("event")
    logger.warning("surprise\x1b[2J")
    logger.error("failure")
    logger.info("  its fix")
    logging.getLogger(PROGRESS).info("step 1/2")
    logging.getLogger(RESULT).info("held-out loss 2.0")


def test_log_to_stderr_prints_messages_from_info_on_and_results_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    log_to_stderr()
    log_to_stderr()  # replaces the first handler
    log_one_of_each()
    out, err = capsys.readouterr()
    assert out == "held-out loss 2.0\n"
    assert err == "phalanx: event\nphalanx: surprise\\x1b[2J\nphalanx: failure\n  its fix\nstep 1/2\n"


@pytest.mark.parametrize(
    ("levels", "expected"),
    [
        ("error", "phalanx: failure\n"),
        ("WARNING", "phalanx: surprise\\x1b[2J\nphalanx: failure\n"),
        ("error,launch=warning", "phalanx: surprise\\x1b[2J\nphalanx: failure\n"),
        ("launch.supervisor=error", "phalanx: failure\nstep 1/2\n"),
        ("error,train.progress=info", "phalanx: failure\nstep 1/2\n"),
    ],
)
def test_log_to_stderr_applies_levels_of_environment(
    levels: str, expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PHALANX_LOG", "launch=debug,train=error")
    log_to_stderr()
    monkeypatch.setenv("PHALANX_LOG", levels)
    log_to_stderr()  # replaces the levels
    log_one_of_each()
    out, err = capsys.readouterr()
    assert (out, err) == ("held-out loss 2.0\n", expected)


def test_log_to_stderr_prints_time_level_module_and_rank_when_debugging(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PHALANX_LOG", "train.worker=debug")
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    log_to_stderr()
    logging.getLogger("phalanx.train.worker").debug("joined")
    logging.getLogger("phalanx.train.session").debug("not of this module")
    (line,) = capsys.readouterr().err.splitlines()
    time, text = line.split(" ", 1)
    assert len(time) == len("12:00:00.000")
    assert text == "debug phalanx.train.worker: [rank 3] joined"


def test_log_to_stderr_names_rank_when_there_are_several(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    log_to_stderr()
    try:
        raise KeyError("missing")
    except KeyError:
        logging.getLogger("phalanx.train.worker").exception("failed after step 2")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "phalanx: [rank 3] failed after step 2"
    assert lines[-1] == "KeyError: 'missing'"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("loud", "has an unknown level 'loud'"),
        ("info,train=", "has an unknown level ''"),
        ("lanch=debug", "has an unknown module 'lanch'"),
        ("train.workers=debug", "has an unknown module 'train.workers'"),
    ],
)
def test_parse_levels_refuses_unknown_levels_and_modules(text: str, problem: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_levels(text)
    assert (caught.value.field, caught.value.value, caught.value.problem) == ("PHALANX_LOG", text, problem)


def test_level_name_is_that_of_the_level_or_below() -> None:
    levels = {5: "debug", logging.INFO: "info", logging.INFO + 5: "info", logging.CRITICAL: "error"}
    assert {level: level_name(level) for level in levels} == levels


def test_handler_survives_closed_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    class ClosedPipe(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError(text)

    log_to_stderr()
    monkeypatch.setattr("sys.stderr", ClosedPipe())
    log_one_of_each()


LIBRARY = """
import logging
import phalanx.runs.checkpoints, phalanx.launch.failures, phalanx.train.progress, phalanx.train.worker
assert not logging.getLogger("phalanx").handlers
logger = logging.getLogger("phalanx.runs.checkpoints")
logger.info("not shown")
logger.warning("shown by Python's last resort")
logging.getLogger("phalanx").setLevel(logging.CRITICAL)
logger.warning("silenced")
assert not logging.getLogger().handlers
"""


def test_library_installs_no_handler_and_is_silenced_by_its_logger(tmp_path: Path) -> None:
    (tmp_path / "library.py").write_text(LIBRARY)
    done = run_python([sys.executable, "-m", "library"], cwd=tmp_path, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert (done.stdout, done.stderr) == ("", "shown by Python's last resort\n")


def test_result_that_cannot_be_written_is_an_error_and_a_message_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a traceback of logging, which would be all that a user sees of a full disk."""
    log_to_stderr()
    with contextlib.suppress(OSError), open("/dev/full", "w") as full:  # its buffer is not empty
        monkeypatch.setattr(sys, "stdout", full)
        monkeypatch.setattr(sys, "stderr", full)
        logging.getLogger("phalanx.launch").warning("lost")
        with pytest.raises(OSError, match="No space left on device"):
            logging.getLogger(RESULT).info("held-out loss 2.0")
        monkeypatch.undo()

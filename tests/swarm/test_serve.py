"""The loop of a coordinator's process."""

from __future__ import annotations

import io
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.swarm.serve import run_rounds
from phalanx.swarm.tensor_files import TensorFileError


class FailingCoordinator(SimpleNamespace):
    """A coordinator whose ticks raise one error after the other, and then end the swarm."""

    def __init__(self, errors: list[Exception]) -> None:
        super().__init__(errors=errors, problems={}, ticked_at=0.0, clock=lambda: 1.0)
        self.state = SimpleNamespace(committed=0, done=False, members={})

    def tick(self) -> None:
        if self.errors:
            raise self.errors.pop(0)
        self.state.done = True

    @property
    def problem(self) -> str:
        return "; ".join(filter(None, self.problems.values()))

    def status(self) -> dict[str, Any]:
        return {"nodes": [], "waits_for": "", "round": 0, "rounds": 1}


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.swarm.serve.RETRY_SECONDS", 0.0)


def test_run_rounds_continues_after_any_error_and_reports_it(capsys: pytest.CaptureFixture[str]) -> None:
    errors = [OSError(24, "Too many open files"), TensorFileError("begin is truncated"), KeyError("x"), MemoryError()]
    run_rounds(FailingCoordinator([*errors]), threading.Event())
    messages = capsys.readouterr().err.splitlines()
    assert [line for line in messages if "cannot be opened or closed" in line] == [
        f"phalanx: a round cannot be opened or closed: {error!r}" for error in errors
    ]
    assert messages[-1] == "phalanx: the problem is solved"


def test_run_rounds_continues_when_nobody_reads_its_output(monkeypatch: pytest.MonkeyPatch) -> None:
    class ClosedPipe(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError(text)

    monkeypatch.setattr("sys.stderr", ClosedPipe())
    coordinator = FailingCoordinator([OSError("full")])
    run_rounds(coordinator, threading.Event())
    assert coordinator.state.done

"""Programs as child processes that end in time, or are left behind: a driver that hangs holds whoever asks it in the
kernel, where no signal reaches, so nothing here waits for the dead."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO

MAX_OUTPUT_BYTES = 4 << 20
"""Of an answer that are read."""


@dataclass(frozen=True)
class CommandOutput:
    """What a program said, on stdout and stderr together, and its exit code; None where it gave none in time."""

    text: str
    code: int | None = 0


class TimedProcess:
    """A program that runs in a session of its own, with its words in a file: pipes end only with its own children."""

    def __init__(self, argv: Sequence[str]) -> None:
        """Raises OSError if it cannot be started."""
        self._output_file = _memory_file()
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=self._output_file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "LC_ALL": "C"},
        )

    def wait_output(self, seconds: float) -> CommandOutput:
        """What it said once it ended; after so many seconds it is killed, with its children."""
        try:
            code: int | None = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(1)
        self._output_file.seek(0)
        with self._output_file:
            return CommandOutput(self._output_file.read(MAX_OUTPUT_BYTES).decode(errors="replace"), code)


def _memory_file() -> IO[bytes]:
    """In memory where the system has that: a full or read-only disk is for a check to find."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("answer"), "w+b")
    return tempfile.TemporaryFile()


def run_command(argv: Sequence[str], seconds: float) -> CommandOutput:
    """Run a program for so many seconds at most. Raises OSError if it cannot be started."""
    return TimedProcess(argv).wait_output(seconds)

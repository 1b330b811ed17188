"""Child processes with a time limit.

A hung driver blocks its caller in the kernel, where no signal has an effect. Such a process is left behind.
"""

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
"""Maximum number of bytes of an output that are read."""


@dataclass(frozen=True)
class CommandOutput:
    """The joint stdout and stderr of a program, and its exit code, or None if it did not finish in time."""

    text: str
    code: int | None = 0


class TimedProcess:
    """A program in its own session, with its output in a file.

    A pipe would remain open until the last child of the program exits.
    """

    def __init__(self, argv: Sequence[str]) -> None:
        """Start the program.

        Raises OSError if the program cannot be started.
        """
        self._output_file = _open_anonymous_file()
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=self._output_file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "LC_ALL": "C"},
        )

    def wait_output(self, seconds: float) -> CommandOutput:
        """Return the output after the program's end, or kill it and its children after the time limit."""
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


def _open_anonymous_file() -> IO[bytes]:
    """Return an anonymous file, in memory if possible: a full or read-only disk is for a check to find."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("answer"), "w+b")
    return tempfile.TemporaryFile()


def run_command(argv: Sequence[str], seconds: float) -> CommandOutput:
    """Run a program with a time limit, and return its output.

    Raises OSError if the program cannot be started.
    """
    return TimedProcess(argv).wait_output(seconds)

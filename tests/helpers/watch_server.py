"""Commands that serve pages."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from phalanx.testing.processes import start_python

WEB_OPTIONS = ("--web", "--port", "0", "--every", "0.2")


@contextmanager
def serving(*arguments: object) -> Iterator[str]:
    """Yield the address that a command serves; the command opens no browser, and exits on Ctrl-C without output."""
    command = [sys.executable, "-m", "phalanx", *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    # Processes that a shell starts in the background ignore Ctrl-C, and so do their children.
    disposition = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = start_python(command, **pipes, text=True, env={**os.environ, "BROWSER": "true"})
    finally:
        signal.signal(signal.SIGINT, disposition)
    with process:
        try:
            yield re.match(r"(http://[\d.]+:\d+/\w*) ", process.stdout.readline())[1]
            process.send_signal(signal.SIGINT)
            outputs = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, *outputs) == (0, "", "")


@contextmanager
def watch_server(run, *options: str) -> Iterator[str]:
    """Yield an address of `phalanx watch`, by default that of its page."""
    with serving("watch", run, *(options or WEB_OPTIONS)) as address:
        yield address

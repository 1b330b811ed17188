"""`phalanx watch` as a server."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


def _restore_default_sigint() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


WEB_OPTIONS = ("--web", "--port", "0", "--every", "0.2")


@contextmanager
def watch_server(run, *options: str) -> Iterator[str]:
    """The address of what `phalanx watch` serves, by default its page; it ends on Ctrl-C, with nothing said."""
    watch = [sys.executable, "-m", "phalanx", "watch", str(run), *(options or WEB_OPTIONS)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    # What a shell starts in the background ignores Ctrl-C, and so does all that it starts.
    with subprocess.Popen(watch, **pipes, text=True, preexec_fn=_restore_default_sigint) as process:
        try:
            yield re.match(r"(http://[\d.]+:\d+/\w*) ", process.stdout.readline())[1]
            process.send_signal(signal.SIGINT)
            said = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, *said) == (0, "", "")

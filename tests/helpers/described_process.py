"""`python -m tests.helpers.described_process FD WAY`: print facts about its start, and exit in a
given way; with "fork", fork another process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from phalanx.launch.fork_server import can_fork_itself
from phalanx.launch.warm_process import ForkedProcess, warm_process


def describe() -> dict[str, object]:
    """Return the facts that a process can observe about its start."""
    return {
        "arguments": sys.argv[1:],
        "module": Path(sys.argv[0]).name,
        "is main": __name__ == "__main__",
        "mark": os.environ.get("MARK"),
        "variables": sorted(set(os.environ) - {"LC_CTYPE"}),
        "directory": os.getcwd(),
        "leads session": os.getsid(0) == os.getpid(),
        "parent": os.getppid(),
        "command line": Path("/proc/self/cmdline").read_bytes().rstrip(b"\0").decode().split("\0"),
        "stdin": sys.stdin.read(),
        "hangup": str(signal.getsignal(signal.SIGHUP)),
        "interrupt": str(signal.getsignal(signal.SIGINT)),
        "buffering": [(stream.line_buffering, stream.write_through) for stream in (sys.stdout, sys.stderr)],
    }


def fork_again() -> None:
    """Print whether this process can be a warm one, and let it fork a process that prints an empty list."""
    print(can_fork_itself(["json"]), flush=True)
    with warm_process(["json"]) as warm:
        assert warm is not None
        ForkedProcess(warm, [sys.executable, "-m", "json.tool"], stdin=subprocess.PIPE).communicate(b"[]", timeout=60)


def main() -> None:
    if sys.argv[1] == "fork":
        return fork_again()
    with open(int(sys.argv[1]), "w") as file:
        file.write("from the child")
    print(json.dumps(describe()))
    ending = sys.argv[2]
    if ending == "message":
        sys.exit("it cannot go on")
    if ending == "error":
        raise ValueError("of no use")
    sys.exit(int(ending))


if __name__ == "__main__":
    main()

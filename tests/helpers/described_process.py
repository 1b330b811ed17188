"""`python -m tests.helpers.described_process FD WAY`: says what it finds when it starts, and ends in some way."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path


def describe() -> dict[str, object]:
    """What a process can see of how it was started."""
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


def main() -> None:
    with open(int(sys.argv[1]), "w") as file:
        file.write("from the child")
    print(json.dumps(describe()))
    way = sys.argv[2]
    if way == "message":
        sys.exit("it cannot go on")
    if way == "error":
        raise ValueError("of no use")
    sys.exit(int(way))


if __name__ == "__main__":
    main()

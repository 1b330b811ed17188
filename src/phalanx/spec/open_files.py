"""How many files and sockets a process may have open."""

from __future__ import annotations

import resource


def raise_open_files_limit() -> None:
    """Let this process open as many files and sockets as its hard limit allows; the usual soft limit is 1,024."""
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))

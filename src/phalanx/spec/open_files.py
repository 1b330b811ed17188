"""Limit on the files and sockets that a process may have open."""

from __future__ import annotations

import resource


def raise_open_files_limit() -> None:
    """Raise the limit on open files and sockets of this process to its hard limit.

    The usual soft limit is 1,024.
    """
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))

"""Who is at work in a run directory: a run's launcher and its first rank each hold a lock on a file there, which ends
with them in any case. Ranks come and go while the launcher stays; on another node they may outlive it."""

from __future__ import annotations

import fcntl
import os
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

from phalanx.spec.errors import UserError

LOCK_FILE = "lock"
LAUNCHER_LOCK_FILE = "launcher.lock"
SHUTDOWN_GRACE_SECONDS = 5.0


def acquire_run_lock(
    directory: Path,
    timeout_seconds: float = SHUTDOWN_GRACE_SECONDS,
    owner_pid: int | None = None,
    name: str = LOCK_FILE,
) -> IO[str] | None:
    """Keep others out of a run directory as long as what is returned lives; None where the file system has no locks.
    They are told of the process to end (`owner_pid`), if that is not this one.

    Raises UserError if somebody is in it for longer than `timeout_seconds`.
    """
    file = (directory / name).open("a+")
    try:
        _wait_until(lambda: _try_lock(file), directory, timeout_seconds)
    except OSError:
        return None
    file.truncate(0)
    file.write(f"{owner_pid or os.getpid()} on {socket.gethostname()}")
    file.flush()
    return file


def is_running(directory: Path) -> bool | None:
    """Whether a run is under way there; None where that cannot be known: it runs on another host, or is an old one."""
    lock_states = _read_locks(directory)
    if any(is_held for is_held, _ in lock_states):
        return True
    return (
        False
        if lock_states and all(_parse_owner(owner)[1] == socket.gethostname() for _, owner in lock_states)
        else None
    )


def check_not_running(directory: Path, timeout_seconds: float = SHUTDOWN_GRACE_SECONDS) -> None:
    """Raise UserError if somebody is at work in a run directory for longer than `timeout_seconds`."""
    if timeout_seconds > SHUTDOWN_GRACE_SECONDS and is_running(directory):
        print(f"phalanx: waiting for up to {timeout_seconds:g} s: {_describe_owner(directory)}", file=sys.stderr)
    _wait_until(lambda: not is_running(directory), directory, timeout_seconds)


def _try_lock(file: IO[str]) -> bool:
    """Whether the lock is ours now."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _wait_until(is_free: Callable[[], bool], directory: Path, timeout_seconds: float) -> None:
    """Raise UserError if it does not become so soon, as where somebody was just killed, or only looked."""
    deadline = time.monotonic() + timeout_seconds
    while not is_free():
        if time.monotonic() > deadline:
            raise _in_use_error(directory)
        time.sleep(0.1)


def _read_locks(directory: Path) -> list[tuple[bool, str]]:
    """At each lock that somebody ever held."""
    lock_states = (_read_lock(directory / name) for name in (LAUNCHER_LOCK_FILE, LOCK_FILE))
    return [state for state in lock_states if state is not None]


def _read_lock(file: Path) -> tuple[bool, str] | None:
    """Whether somebody holds a lock, and who did it last; None where nobody ever did."""
    with suppress(OSError), file.open() as lock_file:
        try:
            fcntl.flock(lock_file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True, lock_file.read()
        return False, lock_file.read()
    return None


def _in_use_error(directory: Path) -> UserError:
    process = _lock_owner(directory)[0]
    return UserError("name", directory.name, _describe_owner(directory), fix=f"wait for it, or end it: kill {process}")


def _describe_owner(directory: Path) -> str:
    process, host = _lock_owner(directory)
    return f"{directory} is in use: process {process} on {host} works there"


def _lock_owner(directory: Path) -> tuple[str, str]:
    return _parse_owner(max(_read_locks(directory), default=(False, ""))[1])


def _parse_owner(owner: str) -> tuple[str, str]:
    process, _, host = owner.partition(" on ")
    return process, host

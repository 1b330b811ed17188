"""Locks of a run directory: its launcher and its first rank each lock a file there.

The kernel releases a lock when its process exits. Ranks restart while the launcher stays; on another node they may
outlive it.
"""

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
from phalanx.spec.files.replace import open_no_link
from phalanx.spec.formatting import printable

LOCK_FILE = "lock"
LAUNCHER_LOCK_FILE = "launcher.lock"
SHUTDOWN_GRACE_SECONDS = 5.0


def acquire_run_lock(
    directory: Path,
    timeout_seconds: float = SHUTDOWN_GRACE_SECONDS,
    owner_pid: int | None = None,
    name: str = LOCK_FILE,
) -> IO[str] | None:
    """Lock a run directory until the returned file is closed.

    Args:
        timeout_seconds: How long to wait for another process that holds the lock.
        owner_pid: The process that waiting processes report as the owner; by default this one.
        name: The name of the lock file.

    Returns:
        The open lock file, or None if the file system does not support locks.

    Raises:
        UserError: Another process still holds the lock after `timeout_seconds`, or there is a link in its place.
    """
    try:
        file = open(directory / name, "a+", opener=open_no_link)  # noqa: SIM115 -- the caller closes it
    except OSError as error:
        problem = f"has a file {name} that cannot be opened: {error.strerror}"
        raise UserError("run directory", str(directory), problem, fix="remove the file, or check permissions") from None
    try:
        _wait_until(lambda: _try_lock(file), directory, timeout_seconds)
    except OSError:
        return None
    file.truncate(0)
    file.write(f"{owner_pid or os.getpid()} on {socket.gethostname()}")
    file.flush()
    return file


def is_running(directory: Path) -> bool | None:
    """Return whether a run is active, or None if that is unknown.

    It is unknown for a run on another host, and for a run from before locks existed.
    """
    lock_states = _read_locks(directory)
    if any(is_held for is_held, _ in lock_states):
        return True
    return (
        False
        if lock_states and all(_parse_owner(owner)[1] == socket.gethostname() for _, owner in lock_states)
        else None
    )


def check_not_running(directory: Path, timeout_seconds: float = SHUTDOWN_GRACE_SECONDS) -> None:
    """Raise UserError if a process uses a run directory for longer than `timeout_seconds`."""
    if timeout_seconds > SHUTDOWN_GRACE_SECONDS and is_running(directory):
        message = f"phalanx: waiting for up to {timeout_seconds:g} s: {_describe_owner(directory)}"
        print(printable(message), file=sys.stderr)
    _wait_until(lambda: not is_running(directory), directory, timeout_seconds)


def _try_lock(file: IO[str]) -> bool:
    """Try to acquire the lock, and return whether this process now holds it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _wait_until(is_free: Callable[[], bool], directory: Path, timeout_seconds: float) -> None:
    """Wait until `is_free` returns true, and raise UserError after the timeout.

    A process that was just killed, or that only reads the lock, holds it for a short time.
    """
    deadline = time.monotonic() + timeout_seconds
    while not is_free():
        if time.monotonic() > deadline:
            raise _in_use_error(directory)
        time.sleep(0.1)


def _read_locks(directory: Path) -> list[tuple[bool, str]]:
    """Return the state of each lock file that exists."""
    lock_states = (_read_lock(directory / name) for name in (LAUNCHER_LOCK_FILE, LOCK_FILE))
    return [state for state in lock_states if state is not None]


def _read_lock(file: Path) -> tuple[bool, str] | None:
    """Return whether a process holds a lock, and its last owner; None if the file does not exist."""
    with suppress(OSError), open(file, errors="replace", opener=_open_without_waiting) as lock_file:
        try:
            fcntl.flock(lock_file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True, lock_file.read()
        return False, lock_file.read()
    return None


def _open_without_waiting(path: str, flags: int) -> int:
    """Open a file that may be a pipe in its place, which would block."""
    return os.open(path, flags | os.O_NONBLOCK)


def _in_use_error(directory: Path) -> UserError:
    process = _lock_owner(directory)[0]
    return UserError(
        "name",
        directory.name,
        _describe_owner(directory),
        fix=f"wait until the process exits, or stop it: kill {process}",
    )


def _describe_owner(directory: Path) -> str:
    process, host = _lock_owner(directory)
    return f"{directory} is in use by process {process} on {host}"


def _lock_owner(directory: Path) -> tuple[str, str]:
    return _parse_owner(max(_read_locks(directory), default=(False, ""))[1])


def _parse_owner(owner: str) -> tuple[str, str]:
    process, _, host = owner.partition(" on ")
    return process, host

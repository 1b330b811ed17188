"""Locks of a run directory: its launcher and its first rank each lock a file there.

The kernel releases a lock when its process exits. Ranks restart while the launcher stays; on another node they may
outlive it.
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

from phalanx.spec.errors import UserError
from phalanx.spec.files.replace import open_no_link

logger = logging.getLogger(__name__)

LOCK_FILE = "lock"
LAUNCHER_LOCK_FILE = "launcher.lock"
SHUTDOWN_GRACE_SECONDS = 5.0


def acquire_run_lock(
    directory: Path,
    timeout_seconds: float = SHUTDOWN_GRACE_SECONDS,
    owner_pid: int | None = None,
    name: str = LOCK_FILE,
) -> IO[str] | None:
    """Lock a run directory until the returned file is closed; None if the file system does not support locks.

    Waiting processes report `owner_pid` as the owner, by default this process. Raises UserError if another process
    still holds the lock after `timeout_seconds`, or there is a link in its place.
    """
    try:
        file = open(directory / name, "a+", opener=open_no_link)  # noqa: SIM115 -- the caller closes it
    except OSError as error:
        problem = f"has a file {name} that cannot be opened: {error.strerror}"
        raise UserError("run directory", str(directory), problem, fix="remove the file, or check permissions") from None

    def try_lock() -> bool:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    try:
        _wait_until(try_lock, directory, timeout_seconds)
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
    locks = _read_locks(directory)
    if any(is_held for is_held, _ in locks):
        return True
    is_local = bool(locks) and all(owner.partition(" on ")[2] == socket.gethostname() for _, owner in locks)
    return False if is_local else None


def check_not_running(directory: Path, timeout_seconds: float = SHUTDOWN_GRACE_SECONDS) -> None:
    """Raise UserError if a process uses a run directory for longer than `timeout_seconds`."""
    if timeout_seconds > SHUTDOWN_GRACE_SECONDS and is_running(directory):
        logger.info("waiting for up to %g s: %s", timeout_seconds, _describe_owner(directory)[0])
    _wait_until(lambda: not is_running(directory), directory, timeout_seconds)


def _wait_until(is_free: Callable[[], bool], directory: Path, timeout_seconds: float) -> None:
    """Wait until `is_free` returns true, and raise UserError after the timeout.

    A process that was just killed, or that only reads the lock, holds it for a short time.
    """
    deadline = time.monotonic() + timeout_seconds
    while not is_free():
        if time.monotonic() > deadline:
            problem, process = _describe_owner(directory)
            fix = f"wait until the process exits, or stop it: kill {process}"
            raise UserError("name", directory.name, problem, fix=fix)
        time.sleep(0.1)


def _read_locks(directory: Path) -> list[tuple[bool, str]]:
    """Return for each lock file that exists whether a process holds it, and its last owner."""
    locks = []
    for name in (LAUNCHER_LOCK_FILE, LOCK_FILE):
        # O_NONBLOCK: there may be a pipe in place of the file.
        with suppress(OSError), open(os.open(directory / name, os.O_RDONLY | os.O_NONBLOCK), errors="replace") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                is_held = False
            except BlockingIOError:
                is_held = True
            locks.append((is_held, file.read()))
    return locks


def _describe_owner(directory: Path) -> tuple[str, str]:
    """Return which process uses the directory as text, and its ID."""
    process, _, host = max(_read_locks(directory), default=(False, ""))[1].partition(" on ")
    return f"{directory} is in use by process {process} on {host}", process

"""What breaks runs from outside: files that are damaged, disks without space, groups of processes without memory."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from phalanx.testing.processes import wait_until


class NotAllowed(OSError):  # noqa: N818 - a fact about the machine
    """This process may not do that on this machine."""


def truncate_file(file: Path) -> None:
    """Half of a file is gone."""
    os.truncate(file, file.stat().st_size // 2)


def flip_bit(file: Path) -> None:
    """One bit of a file is another."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@contextmanager
def small_disk(mount_point: Path, size_bytes: int) -> Iterator[None]:
    """A filesystem of its own, in memory.

    Raises NotAllowed.
    """
    mount_point.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "phalanx-test", str(mount_point)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode:
        raise NotAllowed("this process may not mount a filesystem")
    try:
        yield
    finally:
        subprocess.run(["umount", str(mount_point)], check=True)


def fill_disk(directory: Path, spare_bytes: int = 0) -> Path:
    """Take the space of a filesystem that is left; returns the file that has it."""
    filler = directory / "others"
    with filler.open("ab", buffering=0) as file:
        for size in (2**20, 2**12, 1):
            with suppress(OSError):
                while True:
                    file.write(b"0" * size)
        file.truncate(file.tell() - spare_bytes)
    return filler


@contextmanager
def memory_limited(max_bytes: int) -> Iterator[Callable[[int], None]]:
    """A group of processes that may take so much more together (cgroup v1); what it gives has a process join it.

    Raises NotAllowed.
    """
    group = Path(f"/sys/fs/cgroup/memory/phalanx-test-{os.getpid()}")
    try:
        group.mkdir()
    except OSError as error:
        raise NotAllowed(f"this process may not make a cgroup with a limit of memory: {error}") from None

    def join(pid: int) -> None:
        (group / "cgroup.procs").write_text(str(pid))

    try:
        (group / "memory.limit_in_bytes").write_text(str(max_bytes))
        yield join
    finally:
        wait_until(lambda: not (group / "cgroup.procs").read_text(), "the group is empty", 10)
        group.rmdir()

"""Faults for tests: damaged files, full disks, and memory limits of process groups."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from phalanx.testing.processes import wait_until


class NotAllowed(OSError):  # noqa: N818 - a fact about the machine
    """The process lacks a permission on this machine."""


def truncate_file(file: Path) -> None:
    """Remove the second half of a file."""
    os.truncate(file, file.stat().st_size // 2)


def flip_bit(file: Path) -> None:
    """Flip one bit in the middle of a file."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@contextmanager
def small_disk(mount_point: Path, size_bytes: int) -> Iterator[None]:
    """Mount a separate filesystem in memory; raise NotAllowed if this process may not mount filesystems."""
    mount_point.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "phalanx-test", str(mount_point)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode:
        raise NotAllowed("this process may not mount a filesystem")
    try:
        yield
    finally:
        subprocess.run(["umount", str(mount_point)], check=True)


def fill_disk(directory: Path, spare_bytes: int = 0) -> Path:
    """Fill a filesystem up to `spare_bytes`, and return the file that occupies its space."""
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
    """Create a group of processes with a total memory limit (cgroup v1).

    Yields a function that moves a process into the group. Raises NotAllowed if this process may not create the group.
    """
    group = Path(f"/sys/fs/cgroup/memory/phalanx-test-{os.getpid()}")
    try:
        group.mkdir()
    except OSError as error:
        raise NotAllowed(f"this process may not create a cgroup with a memory limit: {error}") from None

    def join(pid: int) -> None:
        (group / "cgroup.procs").write_text(str(pid))

    try:
        (group / "memory.limit_in_bytes").write_text(str(max_bytes))
        yield join
    finally:
        wait_until(lambda: not (group / "cgroup.procs").read_text(), "the group is empty", 10)
        group.rmdir()

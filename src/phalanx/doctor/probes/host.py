"""Memory and file systems of the host."""

from __future__ import annotations

import re
from dataclasses import dataclass

from phalanx.doctor.machine import Machine


@dataclass(frozen=True)
class DiskSpace:
    """Space of a file system."""

    size_bytes: int
    free_bytes: int
    """Free bytes that this user may fill."""
    percent: int
    """Used percentage of the space that this user may fill."""


def disk_space(machine: Machine, name: str, path: str) -> DiskSpace | None:
    """Return the space of a path's file system, or None if df does not report it."""
    output = machine.run(name, "df", "-Pk", path)
    row = re.search(r"\s(\d+)\s+(\d+)\s+(\d+)\s+(\d+)%", output.text if output else "")
    return DiskSpace(int(row[1]) * 1024, int(row[3]) * 1024, int(row[4])) if row else None


def memory_bytes(machine: Machine) -> dict[str, int]:
    """Return the sizes in /proc/meminfo by name."""
    text = machine.read("/proc/meminfo") or ""
    return {name: int(size) * 1024 for name, size in re.findall(r"^(\w+):\s+(\d+) kB", text, re.MULTILINE)}


def has_several_numa_nodes(machine: Machine) -> bool:
    """Return whether the machine has more than one NUMA node."""
    return len(machine.glob("/sys/devices/system/node/node[0-9]*")) > 1

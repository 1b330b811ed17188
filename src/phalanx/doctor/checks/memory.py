"""The host's memory."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import PurePosixPath

from phalanx.doctor.expectations import Expectations
from phalanx.doctor.finding import CheckRule, CheckSkipped, DoctorFinding, check_values
from phalanx.doctor.machine import Machine
from phalanx.doctor.probes import pci
from phalanx.spec.formatting import GIB

MIN_FREE_SHARE = 0.1
AVAILABLE = CheckRule(
    id="memory.available",
    quantity="share of memory that is available",
    severity="WARN",
    threshold=f"at least {100 * MIN_FREE_SHARE:g}",
    unit="%",
    source="ours: below that, the kernel reclaims pages during the run",
    remedy="stop the processes of earlier jobs",
    command="ps aux --sort=-rss | head",
)
HEADROOM = CheckRule(
    id="memory.headroom",
    quantity="available memory, for runs on CPUs",
    severity="FAIL",
    threshold="at least the need of the run's ranks",
    unit="GiB",
    source="the run (`phalanx memory`)",
    remedy="free memory, start fewer ranks, or choose a layout that needs less",
    command="phalanx memory RUN.toml; free -h",
)
RULES = (AVAILABLE, HEADROOM)
CGROUP_V2 = "/sys/fs/cgroup", ("memory.max", "memory.current", "memory.stat"), "(?:in)?active_file"
CGROUP_V1 = (
    "/sys/fs/cgroup/memory",
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat"),
    "total_(?:in)?active_file",
)
"""Cgroup version: directory; files of limit, use and statistics; statistics of file pages.

Source: Linux, cgroup-v2.rst and cgroup-v1/memory.rst.
"""


def check(machine: Machine, expected: Expectations) -> list[DoctorFinding]:
    """Check /proc/meminfo, or the limits of cgroups where they are lower."""
    meminfo = sizes(machine)
    if not meminfo.get("MemTotal") or "MemAvailable" not in meminfo:
        raise CheckSkipped("/proc/meminfo has no sizes")
    total = meminfo["MemTotal"]
    available = meminfo["MemAvailable"]
    for limit, used in _cgroup_usage(machine):
        total, available = min(total, limit), max(0, min(available, limit - used))
    on_cpus = pci.runs_on_cpu(machine, expected)
    needed_bytes = (expected.rank_bytes or 0) * (expected.ranks or 1) if on_cpus else 0
    is_run = on_cpus and expected.precision is not None
    reason = "the layout or the number of ranks is unknown: give --nproc" if is_run else "no run for CPUs"
    free = {"": round(available / GIB, 2)}
    threshold = f"at least {needed_bytes / GIB:.2f}"
    return [
        *check_values(AVAILABLE, {"": round(100 * available / total)}, lambda percent: percent < 100 * MIN_FREE_SHARE),
        *(
            check_values(HEADROOM, free, lambda gib: gib < needed_bytes / GIB, threshold=threshold)
            if needed_bytes
            else [HEADROOM.skip(reason)]
        ),
    ]


def sizes(machine: Machine) -> dict[str, int]:
    """Return the sizes in /proc/meminfo by name, in bytes."""
    text = machine.read("/proc/meminfo") or ""
    return {name: int(size) * 1024 for name, size in re.findall(r"^(\w+):\s+(\d+) kB", text, re.MULTILINE)}


def _cgroup_usage(machine: Machine) -> Iterator[tuple[int, int]]:
    """Yield the limit and the use, in bytes, of this process's cgroup and of all above it.

    A job of Slurm has a cgroup; a container sees its own as the root. File pages are not counted: the kernel reclaims
    them before it kills a process, as MemAvailable assumes.
    """
    lines = (machine.read("/proc/self/cgroup") or "0::/").splitlines()
    for _, controllers, path in (line.split(":", 2) for line in lines if line.count(":") >= 2):
        if controllers and "memory" not in controllers.split(","):
            continue
        root, names, cached = CGROUP_V1 if controllers else CGROUP_V2
        for directory in (PurePosixPath(path), *PurePosixPath(path).parents):
            limit, used, stat = (machine.read(f"{root}{str(directory).rstrip('/')}/{name}") or "" for name in names)
            if limit.isdecimal() and used.isdecimal() and int(limit):
                files = sum(map(int, re.findall(rf"^{cached} (\d+)", stat, re.MULTILINE)))
                yield int(limit), int(used) - files

"""Memory of the host."""

from __future__ import annotations

import re

from phalanx.measure.doctor.expected import Expected
from phalanx.measure.doctor.finding import Finding, Rule, Skip, judge
from phalanx.measure.doctor.machine import Machine

GIB = 2**30
LEAST_FREE = 0.1
AVAILABLE = Rule(
    "memory.available", "share of memory that is available", "WARN", f"at least {LEAST_FREE:.0%}", "%",
    "ours: below that the kernel reclaims while it works", "end what earlier jobs left behind",
    "ps aux --sort=-rss | head",
)  # fmt: skip
HEADROOM = Rule(
    "memory.headroom", "memory that is available, where CPUs compute", "FAIL", "at least what the run's ranks need",
    "GiB", "the run (`phalanx memory`)", "free memory, start fewer ranks, or take a layout that needs less",
    "phalanx memory RUN.toml; free -h",
)  # fmt: skip
RULES = (AVAILABLE, HEADROOM)


def check(machine: Machine, expected: Expected) -> list[Finding]:
    """By /proc/meminfo, or a cgroup's limit where that is less."""
    text = machine.read("/proc/meminfo") or ""
    sizes = {name: int(size) * 1024 for name, size in re.findall(r"^(\w+):\s+(\d+) kB", text, re.MULTILINE)}
    if not sizes.get("MemTotal") or "MemAvailable" not in sizes:
        raise Skip("/proc/meminfo does not say")
    total, available = _within(machine, sizes["MemTotal"], sizes["MemAvailable"])
    need = (expected.rank_bytes or 0) * (expected.ranks or 1) if expected.gpus == 0 else 0
    free, needed = {"": round(available / GIB, 2)}, f"at least {need / GIB:.2f}"
    return [
        *judge(AVAILABLE, {"": round(100 * available / total)}, lambda percent: percent < 100 * LEAST_FREE),
        *(
            judge(HEADROOM, free, lambda gib: gib < need / GIB, needed)
            if need
            else [HEADROOM.skipped("no run for CPUs")]
        ),
    ]


def _within(machine: Machine, total: int, available: int) -> tuple[int, int]:
    """What a cgroup (version 2, as containers see their own) leaves of both."""
    limit, used = (machine.read(f"/sys/fs/cgroup/memory.{name}") or "" for name in ("max", "current"))
    if not limit.isdecimal() or not used.isdecimal():
        return total, available
    return min(total, int(limit)), max(0, min(available, int(limit) - int(used)))

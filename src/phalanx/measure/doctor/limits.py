"""Limits of the system that stop NCCL: memory that may be locked, and shared memory."""

from __future__ import annotations

import re

from phalanx.measure.doctor import ports
from phalanx.measure.doctor.disk import space
from phalanx.measure.doctor.expected import Expected
from phalanx.measure.doctor.finding import Finding, Rule, judge
from phalanx.measure.doctor.machine import Machine

GIB = 2**30
MEMLOCK_GIB = 32
SHM_GIB = 8
MEMLOCK = Rule(
    "host.memlock", "memory that a process may lock, for RDMA", "FAIL", f"at least {MEMLOCK_GIB}, or unlimited", "GiB",
    "Primus (memlock >= 32 GiB)", "lift the limit, and start the job anew",
    "ulimit -l unlimited; docker run --ulimit memlock=-1; LimitMEMLOCK=infinity in slurmd.service",
)  # fmt: skip
SHM = Rule(
    "host.shm", "size of /dev/shm", "FAIL", f"at least {SHM_GIB}", "GiB", "Primus (/dev/shm >= 8 GiB)",
    "make it larger: ranks of a node, and loaders, share memory there",
    "mount -o remount,size=16G /dev/shm; docker run --shm-size=16g",
)  # fmt: skip
SHM_FREE = Rule(
    "host.shm_free", "free space of /dev/shm", "WARN", f"at least {SHM_GIB}", "GiB", "Primus (/dev/shm >= 8 GiB)",
    "remove what earlier jobs left there", "ls -la /dev/shm",
)  # fmt: skip
RULES = (MEMLOCK, SHM, SHM_FREE)


def check(machine: Machine, _: Expected) -> list[Finding]:
    """Of this process, as ranks started beside it would have them."""
    limits = machine.read("/proc/self/limits") or ""
    locked = re.search(r"^Max locked memory\s+(\d+|unlimited)", limits, re.MULTILINE)
    shared = space(machine, "df_shm", "/dev/shm")
    if not ports.devices(machine):
        memlock = [MEMLOCK.skipped(ports.NONE)]
    elif locked is None:
        memlock = [MEMLOCK.skipped("/proc/self/limits does not say")]
    elif locked[1] == "unlimited":
        memlock = [MEMLOCK.well("unlimited")]
    else:
        memlock = judge(MEMLOCK, {"memlock": round(int(locked[1]) / GIB, 3)}, lambda gib: gib < MEMLOCK_GIB)
    if shared is None:
        return [*memlock, SHM.skipped("df says nothing of /dev/shm"), SHM_FREE.skipped("df says nothing of /dev/shm")]
    size = judge(SHM, {"/dev/shm": round(shared.size_bytes / GIB, 3)}, lambda gib: gib < SHM_GIB)
    if size[0].severity != "OK":
        return [*memlock, *size]
    return [
        *memlock,
        *size,
        *judge(SHM_FREE, {"/dev/shm": round(shared.free_bytes / GIB, 3)}, lambda gib: gib < SHM_GIB),
    ]

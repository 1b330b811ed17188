"""Limits of the system that stop NCCL: lockable memory and shared memory."""

from __future__ import annotations

import re

from phalanx.doctor.checks import memory, rdma_ports
from phalanx.doctor.checks.disk import space
from phalanx.doctor.expectations import Expectations
from phalanx.doctor.finding import CheckRule, DoctorFinding, check_values
from phalanx.doctor.machine import Machine
from phalanx.spec.formatting import GIB

MEMLOCK_GIB = 32
SHM_GIB = 8
SHM_SHARE = 0.4
MEMLOCK = CheckRule(
    id="host.memlock",
    quantity="lockable memory of a process, for RDMA",
    severity="FAIL",
    threshold=f"at least {MEMLOCK_GIB}, or unlimited",
    unit="GiB",
    source="Primus (memlock >= 32 GiB)",
    remedy="raise the limit, and restart the job",
    command="ulimit -l unlimited; docker run --ulimit memlock=-1; LimitMEMLOCK=infinity in slurmd.service",
)
SHM = CheckRule(
    id="host.shm",
    quantity="size of /dev/shm",
    severity="FAIL",
    threshold=f"at least {SHM_GIB}, or {SHM_SHARE:g} of the memory if that is less",
    unit="GiB",
    source="Primus (/dev/shm >= 8 GiB)",
    remedy="enlarge it: ranks of a node, and data loaders, share memory there",
    command="mount -o remount,size=16G /dev/shm; docker run --shm-size=16g",
)
SHM_FREE = CheckRule(
    id="host.shm_free",
    quantity="free space of /dev/shm",
    severity="WARN",
    threshold="the minimum of host.shm",
    unit="GiB",
    source="Primus (/dev/shm >= 8 GiB)",
    remedy="remove files of earlier jobs",
    command="ls -la /dev/shm",
)
RULES = (MEMLOCK, SHM, SHM_FREE)


def check(machine: Machine, expected: Expectations) -> list[DoctorFinding]:
    """Check the limits of this process, which ranks started next to it inherit."""
    limits = machine.read("/proc/self/limits") or ""
    locked = re.search(r"^Max locked memory\s+(\d+|unlimited)", limits, re.MULTILINE)
    shm_space = space(machine, "df_shm", "/dev/shm")
    min_gib = _min_shm_gib(machine)
    if not rdma_ports.rdma_devices(machine):
        memlock = [MEMLOCK.skip(rdma_ports.NO_DEVICE)]
    elif expected.gpus == 0:
        memlock = [MEMLOCK.skip(rdma_ports.NOT_USED)]
    elif locked is None:
        memlock = [MEMLOCK.skip("/proc/self/limits has no such limit")]
    elif locked[1] == "unlimited":
        memlock = [MEMLOCK.ok("unlimited")]
    else:
        memlock = check_values(MEMLOCK, {"memlock": round(int(locked[1]) / GIB, 3)}, lambda gib: gib < MEMLOCK_GIB)
    if shm_space is None:
        return [*memlock, SHM.skip("df does not report /dev/shm"), SHM_FREE.skip("df does not report /dev/shm")]
    threshold = f"at least {min_gib:.3g}"
    size = check_values(
        SHM, {"/dev/shm": round(shm_space.size_bytes / GIB, 3)}, lambda gib: gib < min_gib, threshold=threshold
    )
    if size[0].severity != "OK":
        return [*memlock, *size]
    return [
        *memlock,
        *size,
        *check_values(
            SHM_FREE, {"/dev/shm": round(shm_space.free_bytes / GIB, 3)}, lambda gib: gib < min_gib, threshold=threshold
        ),
    ]


def _min_shm_gib(machine: Machine) -> float:
    """Return the minimum size of /dev/shm in GiB: Primus's for GPU nodes, less with little memory.

    By default, /dev/shm has half of the memory (Linux).
    """
    total = memory.sizes(machine).get("MemTotal", 0) / GIB
    return min(SHM_GIB, SHM_SHARE * total) if total else SHM_GIB

"""The host: limits that stop NCCL, memory, clock and CPUs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import PurePosixPath

from phalanx.doctor.expectations import Expectations
from phalanx.doctor.finding import CheckSkipped, DoctorFinding
from phalanx.doctor.machine import Machine
from phalanx.doctor.probes import pci, rdma
from phalanx.doctor.probes.host import disk_space, has_several_numa_nodes, memory_bytes
from phalanx.doctor.probes.text import first_match
from phalanx.doctor.rules import RULES, skip_rules
from phalanx.spec.formatting import GIB
from phalanx.spec.precision import BF16_PRECISIONS

CPUS = "/sys/devices/system/cpu"
CGROUP_V2 = "/sys/fs/cgroup", ("memory.max", "memory.current", "memory.stat"), "(?:in)?active_file"
CGROUP_V1 = (
    "/sys/fs/cgroup/memory",
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat"),
    "total_(?:in)?active_file",
)
"""Cgroup version: directory; files of limit, use and statistics; statistics of file pages.

Source: Linux, cgroup-v2.rst and cgroup-v1/memory.rst.
"""


def check_limits(machine: Machine, expected: Expectations) -> Iterator[DoctorFinding]:
    """Check the limits of this process, which ranks started next to it inherit, and shared memory."""
    yield from _check_memlock(machine, expected)
    space = disk_space(machine, "df_shm", "/dev/shm")
    if space is None:
        yield from skip_rules("df does not report /dev/shm", "host.shm", "host.shm_free")
        return
    rule = RULES["host.shm"]
    total_gib = memory_bytes(machine).get("MemTotal", 0) / GIB
    min_gib = min(rule.limit, rule.parameters["memory_share"] * total_gib) if total_gib else rule.limit
    size = rule.check({"/dev/shm": round(space.size_bytes / GIB, 3)}, limit=min_gib)
    yield from size
    if size[0].severity == "OK":
        yield from RULES["host.shm_free"].check({"/dev/shm": round(space.free_bytes / GIB, 3)}, limit=min_gib)


def _check_memlock(machine: Machine, expected: Expectations) -> list[DoctorFinding]:
    rule = RULES["host.memlock"]
    locked = first_match(r"^Max locked memory\s+(\d+|unlimited)", machine.read("/proc/self/limits"))
    if not rdma.rdma_devices(machine):
        return [rule.skip(rdma.NO_DEVICE)]
    if expected.gpus == 0:
        return [rule.skip(rdma.NOT_USED)]
    if locked is None:
        return [rule.skip("/proc/self/limits has no such limit")]
    if locked == "unlimited":
        return [rule.ok("unlimited")]
    return rule.check({"memlock": round(int(locked) / GIB, 3)})


def check_memory(machine: Machine, expected: Expectations) -> Iterator[DoctorFinding]:
    """Check /proc/meminfo, or the limits of cgroups where they are lower."""
    sizes = memory_bytes(machine)
    if not sizes.get("MemTotal") or "MemAvailable" not in sizes:
        raise CheckSkipped("/proc/meminfo has no sizes")
    total = sizes["MemTotal"]
    available = sizes["MemAvailable"]
    for limit, used in _read_cgroup_usage(machine):
        total, available = min(total, limit), max(0, min(available, limit - used))
    yield from RULES["memory.available"].check(round(100 * available / total))
    on_cpus = pci.runs_on_cpu(machine, expected)
    needed_bytes = (expected.rank_bytes or 0) * (expected.ranks or 1) if on_cpus else 0
    if needed_bytes:
        yield from RULES["memory.headroom"].check(round(available / GIB, 2), limit=needed_bytes / GIB)
    elif on_cpus and expected.precision is not None:
        yield RULES["memory.headroom"].skip("the layout or the number of ranks is unknown: give --nproc")
    else:
        yield RULES["memory.headroom"].skip("no run for CPUs")


def _read_cgroup_usage(machine: Machine) -> Iterator[tuple[int, int]]:
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


def check_clock(machine: Machine, _: Expectations) -> Iterator[DoctorFinding]:
    """Check the clock by chrony if it runs, else by systemd."""
    output = machine.run("chrony", "chronyc", "-n", "tracking")
    if output is not None and output.code == 0:
        status = first_match(r"^Leap status\s*: (.+)$", output.text)
        offset = first_match(r"^System time\s*: ([\d.]+) seconds", output.text)
    else:
        output = machine.run("timedatectl", "timedatectl", "show")
        status = first_match(r"^NTPSynchronized=(yes|no)$", output.text if output else "")
        offset = None
        if status is None:
            raise CheckSkipped("neither chronyc nor timedatectl answers")
    if status is not None:
        yield from RULES["clock.synchronized"].check(status)
    if offset is not None:
        yield from RULES["clock.offset"].check(float(offset))
    else:
        reason = "known to chronyc only: compare several nodes (--save-report, --compare-reports)"
        yield RULES["clock.offset"].skip(reason)


def check_cpu(machine: Machine, expected: Expectations) -> Iterator[DoctorFinding]:
    """Check the CPUs by the files that the kernel provides; most virtual machines have few of them."""
    yield from _check_governors(machine)
    yield _check_offline_cores(machine)
    balancing = machine.read("/proc/sys/kernel/numa_balancing")
    if not (has_several_numa_nodes(machine) and pci.nvidia_gpus(machine)):
        yield RULES["cpu.numa_balancing"].skip("no GPUs on several NUMA nodes")
    elif balancing is None:
        yield RULES["cpu.numa_balancing"].skip("the kernel does not show it")
    else:
        yield from RULES["cpu.numa_balancing"].check(balancing)
    yield _check_bf16_instructions(machine, expected)


def _check_bf16_instructions(machine: Machine, expected: Expectations) -> DoctorFinding:
    rule = RULES["cpu.bf16"]
    if expected.precision not in BF16_PRECISIONS or not pci.runs_on_cpu(machine, expected):
        return rule.skip("no run for CPUs in bf16")
    flags = first_match(r"^(?:flags|Features)\s*: (.*)$", machine.read("/proc/cpuinfo"))
    if flags is None:
        return rule.skip("/proc/cpuinfo lists no flags")
    missing = [name for name in rule.limit if name not in flags.split()]
    is_slow = missing and "bf16" not in flags.split()
    return rule.violation("", f"no {', '.join(missing)}") if is_slow else rule.ok("yes")


def _check_offline_cores(machine: Machine) -> DoctorFinding:
    """Check for offline cores among the present ones.

    A virtual machine also lists cores that could be added. Without SMT, half of the cores are offline on purpose.
    """
    rule = RULES["cpu.offline"]
    offline, present, smt = (machine.read(f"{CPUS}/{name}") for name in ("offline", "present", "smt/control"))
    if offline is None:
        return rule.skip("the kernel does not show it")
    if smt in ("off", "forceoff"):
        return rule.skip("SMT is switched off")
    cores = _parse_core_ranges(offline) & _parse_core_ranges(present) if present else _parse_core_ranges(offline)
    return rule.violation(offline, offline) if cores else rule.ok("none")


def _parse_core_ranges(listed: str) -> set[int]:
    """Return the cores of a list in the kernel's format, such as 0-3,8."""
    ranges = re.findall(r"(\d+)(?:-(\d+))?", listed)
    return {core for first, last in ranges for core in range(int(first), int(last or first) + 1)}


def _check_governors(machine: Machine) -> list[DoctorFinding]:
    """Return one finding per governor; its device is cpu0, or the first core and the number of others."""
    rule = RULES["cpu.governor"]
    paths = machine.glob(f"{CPUS}/cpu[0-9]*/cpufreq/scaling_governor")
    cores: dict[str, list[str]] = {}
    for path in paths:
        cores.setdefault(machine.read(path) or "", []).append(path.split("/")[5])
    if not cores:
        return [rule.skip("the kernel does not show it")]
    devices = {
        governor: names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
        for governor, names in sorted(cores.items())
    }
    return rule.check({device: governor for governor, device in devices.items()})

"""The host's CPUs."""

from __future__ import annotations

import re

from phalanx.doctor.expectations import Expectations
from phalanx.doctor.finding import CheckRule, DoctorFinding, check_values
from phalanx.doctor.machine import Machine
from phalanx.doctor.probes import pci
from phalanx.spec.precision import BF16_PRECISIONS

CPUS = "/sys/devices/system/cpu"
GOVERNOR = CheckRule(
    id="cpu.governor",
    quantity="frequency governor of the cores",
    severity="WARN",
    threshold="performance",
    unit="",
    source="GCM (governor performance)",
    remedy="run the cores at full clock; otherwise ranks wait for the host",
    command="cpupower frequency-set -g performance",
)
OFFLINE = CheckRule(
    id="cpu.offline",
    quantity="offline cores",
    severity="WARN",
    threshold="none",
    unit="",
    source="ours: the node is weaker than the others",
    remedy="switch them on, or find out why they are off",
    command="cat /sys/devices/system/cpu/offline; lscpu",
)
BALANCING = CheckRule(
    id="cpu.numa_balancing",
    quantity="automatic NUMA balancing, on nodes with GPUs",
    severity="WARN",
    threshold="0",
    unit="",
    source="AMD, ROCm system optimization (page migration stalls GPUs); NVIDIA, the same for GH200",
    remedy="switch it off",
    command="sysctl -w kernel.numa_balancing=0",
)
AVX512 = ("avx512bw", "avx512dq", "avx512vl")
BF16 = CheckRule(
    id="cpu.bf16",
    quantity="CPU features, for runs in bf16",
    severity="WARN",
    threshold=f"{', '.join(AVX512)}; or ARM's bf16",
    unit="",
    source="PyTorch (mkldnn_bf16_device_check): without them bf16 is computed element by element, some 30 times slower",
    remedy='set training.precision = "fp32"',
    command="phalanx doctor RUN.toml --set training.precision=fp32; lscpu",
)
RULES = (GOVERNOR, OFFLINE, BALANCING, BF16)


def check(machine: Machine, expected: Expectations) -> list[DoctorFinding]:
    """Check the CPUs by the files that the kernel provides; most virtual machines have few of them."""
    balancing = machine.read("/proc/sys/kernel/numa_balancing")
    has_several_numa_nodes = len(machine.glob("/sys/devices/system/node/node[0-9]*")) > 1
    with_gpus = has_several_numa_nodes and bool(pci.pci_devices(machine, pci.GPU, pci.NVIDIA))
    return [
        *_check_governors(machine),
        _check_offline(machine),
        *(
            check_values(BALANCING, {"": balancing}, lambda flag: flag != "0")
            if with_gpus and balancing is not None
            else [BALANCING.skip("no GPUs on several NUMA nodes")]
        ),
        _check_bf16(machine, expected),
    ]


def _check_bf16(machine: Machine, expected: Expectations) -> DoctorFinding:
    if expected.precision not in BF16_PRECISIONS or not pci.runs_on_cpu(machine, expected):
        return BF16.skip("no run for CPUs in bf16")
    match = re.search(r"^(?:flags|Features)\s*: (.*)$", machine.read("/proc/cpuinfo") or "", re.MULTILINE)
    if match is None:
        return BF16.skip("/proc/cpuinfo lists no flags")
    flags = set(match[1].split())
    missing = [name for name in AVX512 if name not in flags]
    return BF16.violation("", f"no {', '.join(missing)}") if missing and "bf16" not in flags else BF16.ok("yes")


def _check_offline(machine: Machine) -> DoctorFinding:
    """Check for offline cores among the present ones.

    A virtual machine also lists cores that could be added. Without SMT, half of the cores are offline on purpose.
    """
    offline, present, smt = (machine.read(f"{CPUS}/{name}") for name in ("offline", "present", "smt/control"))
    if offline is None:
        return OFFLINE.skip("the kernel does not show it")
    if smt in ("off", "forceoff"):
        return OFFLINE.skip("SMT is switched off")
    offline_cores = _parse_cpu_list(offline) & _parse_cpu_list(present) if present else _parse_cpu_list(offline)
    return OFFLINE.violation(offline, offline) if offline_cores else OFFLINE.ok("none")


def _parse_cpu_list(listed: str) -> set[int]:
    """Return the cores of a list in the kernel's format, such as 0-3,8."""
    ranges = re.findall(r"(\d+)(?:-(\d+))?", listed)
    return {core for first, last in ranges for core in range(int(first), int(last or first) + 1)}


def _check_governors(machine: Machine) -> list[DoctorFinding]:
    paths = machine.glob(f"{CPUS}/cpu[0-9]*/cpufreq/scaling_governor")
    governors = {path.split("/")[5]: machine.read(path) or "" for path in paths}
    if not governors:
        return [GOVERNOR.skip("the kernel does not show it")]
    unusual = sorted({governor for governor in governors.values() if governor != "performance"})
    return [GOVERNOR.violation(_describe_cores(governors, governor), governor) for governor in unusual] or [
        GOVERNOR.ok("performance")
    ]


def _describe_cores(governors: dict[str, str], name: str) -> str:
    """Return the cores with a governor as one device: cpu0, or the first core and the number of others."""
    cores = [core for core, governor in governors.items() if governor == name]
    return cores[0] if len(cores) == 1 else f"{cores[0]} and {len(cores) - 1} more"

"""The host's CPUs."""

from __future__ import annotations

from phalanx.measure.doctor import pci
from phalanx.measure.doctor.expected import Expected
from phalanx.measure.doctor.finding import Finding, Rule, judge
from phalanx.measure.doctor.machine import Machine

CPUS = "/sys/devices/system/cpu"
GOVERNOR = Rule(
    "cpu.governor", "what sets the clock of the cores", "WARN", "performance", "", "GCM (governor performance)",
    "let cores run at full clock: ranks wait for the host else", "cpupower frequency-set -g performance",
)  # fmt: skip
OFFLINE = Rule(
    "cpu.offline", "cores that are switched off", "WARN", "none", "", "ours: the node is weaker than its fellows",
    "switch them on, or say why they are off", "cat /sys/devices/system/cpu/offline; lscpu",
)  # fmt: skip
BALANCING = Rule(
    "cpu.numa_balancing", "automatic NUMA balancing, on nodes with GPUs", "WARN", "0", "",
    "AMD, ROCm system optimization (pages that move stall GPUs); NVIDIA says the same of GH200", "switch it off",
    "sysctl -w kernel.numa_balancing=0",
)  # fmt: skip
RULES = (GOVERNOR, OFFLINE, BALANCING)


def check(machine: Machine, _: Expected) -> list[Finding]:
    """What the kernel shows: of most virtual machines little."""
    paths = machine.listing(f"{CPUS}/cpu[0-9]*/cpufreq/scaling_governor")
    governors = {path.split("/")[5]: machine.read(path) or "" for path in paths}
    other = {
        word: cores for word in set(governors.values()) if word != "performance" and (cores := _cores(governors, word))
    }
    offline, balancing = machine.read(f"{CPUS}/offline"), machine.read("/proc/sys/kernel/numa_balancing")
    several = len(machine.listing("/sys/devices/system/node/node[0-9]*")) > 1
    judged = several and bool(pci.devices(machine, pci.GPU, pci.NVIDIA)) and balancing is not None
    return [
        *(
            [GOVERNOR.broken(cores, word) for word, cores in other.items()]
            or ([GOVERNOR.well("performance")] if governors else [GOVERNOR.skipped("the kernel does not show it")])
        ),
        *(judge(OFFLINE, {offline or "": offline or "none"}, lambda cores: cores != "none")),
        *(
            judge(BALANCING, {"": balancing or ""}, lambda flag: flag != "0")
            if judged
            else [BALANCING.skipped("no GPUs on several NUMA nodes")]
        ),
    ]


def _cores(governors: dict[str, str], word: str) -> str:
    """Those with a governor, as one device: cpu0, or the first of several and how many."""
    mine = [core for core, governor in governors.items() if governor == word]
    return mine[0] if len(mine) == 1 else f"{mine[0]} and {len(mine) - 1} more"

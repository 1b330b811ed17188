"""The kernel log: errors of drivers and hardware since boot."""

from __future__ import annotations

import re

from phalanx.doctor.checks import pcie
from phalanx.doctor.expectations import Expectations
from phalanx.doctor.finding import CheckRule, CheckSkipped, DoctorFinding
from phalanx.doctor.machine import CommandTimeout, Machine
from phalanx.doctor.probes import pci
from phalanx.doctor.probes.nvidia_smi import first_line

HARDWARE_XIDS = frozenset(
    (
        48,
        *range(56, 59),
        *range(62, 65),
        *range(68, 78),
        *range(79, 87),
        88,
        89,
        92,
        *range(94, 106),
        *range(110, 121),
        *range(122, 126),
        140,
        *range(144, 151),
    )
)
"""Xids that OCI classifies as hardware errors, and those of later NVIDIA GPUs.

The latter are an unrecovered ECC error (140), and Blackwell's NVLink errors (144 to 150). Most other Xids are caused by
program errors.
"""
RECOVERY_XID = 154
HARMLESS_ACTIONS = ("None", "Drain P2P")
"""The Xid with the recovery action of a GPU, and the actions that are neither a reset nor a reboot."""
XID = CheckRule(
    id="kernel.xid",
    quantity="hardware Xids in the kernel log",
    severity="FAIL",
    threshold="none",
    unit="Xid",
    source="OCI (its set of Xids); NVIDIA, XID Errors",
    remedy="drain the node, reset {device} or reboot; replace the GPU if the Xid recurs",
    command="dmesg | grep -i xid; nvidia-bug-report.sh",
)
SOFTWARE_XID = CheckRule(
    id="kernel.xid_software",
    quantity="other Xids in the kernel log",
    severity="WARN",
    threshold="none",
    unit="Xid",
    source="NVIDIA, XID Errors",
    remedy="most are caused by program errors; if other programs on {device} cause them too, have it tested",
    command="dmesg | grep -i xid",
)
SWITCH = CheckRule(
    id="kernel.sxid",
    quantity="fatal errors of NVSwitches in the kernel log",
    severity="FAIL",
    threshold="none",
    unit="SXid",
    source="NVIDIA, Fabric Manager User Guide (SXid)",
    remedy="drain the node; reset all GPUs and switches",
    command="dmesg | grep -i sxid; nvidia-smi --gpu-reset",
)
GPU_LOST = CheckRule(
    id="kernel.gpu_lost",
    quantity="GPUs that fell off the bus",
    severity="FAIL",
    threshold="none",
    unit="",
    source="NVIDIA, XID Errors (79)",
    remedy="drain the node, power it off and on; have {device} reseated",
    command="dmesg | grep 'fallen off the bus'",
)
PCIE_LIMITED = CheckRule(
    id="kernel.pcie_limited",
    quantity="GPUs and RDMA cards that the kernel reports as limited",
    severity="WARN",
    threshold="none",
    unit="",
    source="Imbue (available PCIe bandwidth, limited by)",
    remedy="have {device} reseated, or put it into another slot",
    command="dmesg | grep 'limited by'",
)
AER = CheckRule(
    id="kernel.aer",
    quantity="uncorrected PCIe errors in the kernel log",
    severity="FAIL",
    threshold="none",
    unit="",
    source="Linux, PCIe AER; DCGM",
    remedy="have {device} reseated",
    command="dmesg | grep -i aer; lspci -s {device} -vv",
)
MACHINE_CHECK = CheckRule(
    id="kernel.machine_check",
    quantity="errors of CPU or memory",
    severity="WARN",
    threshold="none",
    unit="",
    source="Linux, machine check",
    remedy="have memory and CPU tested",
    command="dmesg | grep -i 'hardware error'; ras-mc-ctl --summary",
)
OUT_OF_MEMORY = CheckRule(
    id="kernel.out_of_memory",
    quantity="programs that the OOM killer killed",
    severity="WARN",
    threshold="none",
    unit="",
    source="Linux (oom-killer)",
    remedy="find the job that used the memory, and check that it has exited",
    command="dmesg | grep -i 'killed process'",
)
DISK = CheckRule(
    id="kernel.disk",
    quantity="errors of disks, or file systems made read-only",
    severity="FAIL",
    threshold="none",
    unit="",
    source="Linux (blk, ext4, xfs)",
    remedy="replace {device}; check its file system",
    command="dmesg | grep -i -e 'I/O error' -e read-only; smartctl -a /dev/{device}",
)
RULES = (XID, SOFTWARE_XID, SWITCH, GPU_LOST, PCIE_LIMITED, AER, MACHINE_CHECK, OUT_OF_MEMORY, DISK)
XID_PATTERN = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)[^)]*\): (\d+)(.*)")
ACTION_PATTERN = re.compile(r"recovery action changed from .* to \S+ \((.*?)\)")
"""The action may be followed by a MIG instance: (PCI:0000:52:00 GPU-I:05)."""
DEVICE_PATTERN = r"(?P<device>[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.\d)"
PATTERNS = (
    (SWITCH, r"(?P<device>nvidia-nvswitch\d+): SXid \([^)]*\): (?P<what>\d+), Fatal"),
    (PCIE_LIMITED, DEVICE_PATTERN + r": (?P<what>[\d.]+ Gb/s available PCIe bandwidth, limited by.*)"),
    (AER, DEVICE_PATTERN + r": (?:AER: )?PCIe Bus Error: severity=(?P<what>Uncorrect\w+ \([\w-]+\))"),
    (MACHINE_CHECK, r"mce: (?P<what>\[Hardware Error\]: .*)"),
    (MACHINE_CHECK, r"EDAC (?P<device>MC\d+): (?P<what>\d+ [CU]E)"),
    (OUT_OF_MEMORY, r"[Oo]ut of memory: Kill(?:ed)? process \d+ \((?P<device>[^)]*)\)"),
    (DISK, r"I/O error, dev (?P<device>(?!fd\d|sr\d|loop\d)[\w-]+)"),  # without absent floppies and CDs
    (DISK, r"EXT4-fs \((?P<device>[\w-]+)\): (?P<what>Remounting filesystem read-only)"),
    (DISK, r"XFS \((?P<device>[\w-]+)\): (?P<what>.*(?:Shutting down filesystem|has been shut down))"),
)
"""Message formats of the drivers.

Sources: Linux (drivers/pci, drivers/edac, mm/oom_kill.c, block, fs/ext4, fs/xfs); NVIDIA (SXid).
"""
GPU_LOST_PATTERN = re.compile(r"NVRM: (?:.*PCI:|GPU )([0-9a-fA-F:.]+)\b.*fallen off the bus")
SOURCES = (
    ("kernel_log", "dmesg", "--notime"),
    ("kernel_journal", "journalctl", "--quiet", "-k", "-b", "-o", "cat", "--lines=20000"),
)
"""Programs that print the log. Some users may read only the journal, which also keeps more."""


def check(machine: Machine, _: Expectations) -> list[DoctorFinding]:
    """Return one finding per kind of error and device, with the last message."""
    text = _read_logs(machine)
    gpus = pci.pci_devices(machine, pci.GPU, pci.NVIDIA)
    cards = pcie.rdma_cards(machine)
    pattern_findings = [
        finding
        for finding in _pattern_findings(text)
        if finding.id != PCIE_LIMITED.id
        or finding.device in cards
        or (finding.device in gpus and _lacks_lanes(finding))
    ]
    findings = [*_xid_findings(text), *pattern_findings]
    ids = {finding.id for finding in findings}
    return [*findings, *(rule.ok("none") for rule in RULES if rule.id not in ids)]


def _lacks_lanes(limited: DoctorFinding) -> bool:
    """Return whether a link lacks lanes; idle GPUs reduce only its speed at boot."""
    return len(set(re.findall(r"x(\d+) link", str(limited.measured)))) > 1


def _read_logs(machine: Machine) -> str:
    """Return the logs of all sources, the newest last; the kernel's own buffer drops the oldest messages."""
    texts: list[str] = []
    messages: list[str] = []
    timeout: CommandTimeout | None = None
    for name, *argv in SOURCES:
        try:
            output = machine.run(name, *argv)
        except CommandTimeout as error:
            timeout = error
            continue
        if output is not None and not output.code and output.text.strip():
            texts.insert(0, output.text)
        elif output is not None:
            messages.append(f"{argv[0]}: {first_line(output.text).removeprefix(f'{argv[0]}: ')}")
    if texts:
        return "\n".join(texts)
    if timeout:
        raise timeout
    if not messages:
        raise CheckSkipped("neither dmesg nor journalctl is installed")
    raise CheckSkipped(f"the kernel log is not readable ({'; '.join(messages)}): run as root")


def _xid_findings(text: str) -> list[DoctorFinding]:
    """Return the last Xid of each kind and GPU; for a lost GPU, only that it is lost."""
    lost = sorted({pci.normalize_pci_address(address.rstrip(":")) for address in GPU_LOST_PATTERN.findall(text)})
    latest: dict[tuple[str, str], DoctorFinding] = {}
    for bus_address, number, message in XID_PATTERN.findall(text):
        address = pci.normalize_pci_address(bus_address)
        xid = int(number)
        action = ACTION_PATTERN.search(message)
        if xid != RECOVERY_XID or action is None:
            rule = XID if xid in HARDWARE_XIDS else SOFTWARE_XID
            latest[address, rule.id] = rule.violation(address, xid)
        elif action[1] not in HARMLESS_ACTIONS:  # an earlier Xid has the reason
            latest.setdefault((address, XID.id), XID.violation(address, f"{xid}: {action[1]}"))
    xids = [finding for (address, _), finding in latest.items() if address not in lost]
    return [*(GPU_LOST.violation(address, "fallen off the bus") for address in lost), *xids]


def _pattern_findings(text: str) -> list[DoctorFinding]:
    latest: dict[tuple[str, str], DoctorFinding] = {}
    for rule, pattern in PATTERNS:
        for match in re.finditer(pattern, text):
            groups = match.groupdict()
            device = groups.get("device") or ""
            latest[rule.id, device] = rule.violation(device, groups.get("what") or match[0])
    return list(latest.values())

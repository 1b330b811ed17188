"""The kernel log: errors of drivers and hardware since boot."""

from __future__ import annotations

import re
from collections.abc import Iterator

from phalanx.doctor.expectations import Expectations
from phalanx.doctor.finding import CheckSkipped, DoctorFinding
from phalanx.doctor.machine import CommandTimeout, Machine
from phalanx.doctor.probes import pci, rdma
from phalanx.doctor.probes.text import first_line
from phalanx.doctor.rules import RULES, SECTIONS

RECOVERY_XID = 154
HARMLESS_ACTIONS = ("None", "Drain P2P")
"""The Xid with the recovery action of a GPU, and the actions that are neither a reset nor a reboot."""
XID_PATTERN = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)[^)]*\): (\d+)(.*)")
ACTION_PATTERN = re.compile(r"recovery action changed from .* to \S+ \((.*?)\)")
"""The action may be followed by a MIG instance: (PCI:0000:52:00 GPU-I:05)."""
GPU_LOST_PATTERN = re.compile(r"NVRM: (?:.*PCI:|GPU )([0-9a-fA-F:.]+)\b.*fallen off the bus")
SOURCES = (
    ("kernel_log", "dmesg", "--notime"),
    ("kernel_journal", "journalctl", "--quiet", "-k", "-b", "-o", "cat", "--lines=20000"),
)
"""Programs that print the log. Some users may read only the journal, which also keeps more."""


def check_kernel_log(machine: Machine, _: Expectations) -> Iterator[DoctorFinding]:
    """Return one finding per kind of error and device, with the last message."""
    text = _read_logs(machine)
    findings = [*_find_xids(text), *_find_rule_matches(text, pci.nvidia_gpus(machine), rdma.rdma_cards(machine))]
    ids = {finding.id for finding in findings}
    yield from findings
    yield from (rule.ok("none") for rule in SECTIONS["kernel_log"].rules if rule.id not in ids)


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


def _find_xids(text: str) -> Iterator[DoctorFinding]:
    """Yield the last Xid of each kind and GPU; for a lost GPU, only that it is lost."""
    lost = sorted({pci.normalize_pci_address(address.rstrip(":")) for address in GPU_LOST_PATTERN.findall(text)})
    yield from (RULES["kernel.gpu_lost"].violation(address, "fallen off the bus") for address in lost)
    latest: dict[tuple[str, str], DoctorFinding] = {}
    for bus_address, number, message in XID_PATTERN.findall(text):
        address = pci.normalize_pci_address(bus_address)
        xid = int(number)
        action = ACTION_PATTERN.search(message)
        if xid != RECOVERY_XID or action is None:
            rule = RULES["kernel.xid" if xid in RULES["kernel.xid"].limit else "kernel.xid_software"]
            latest[address, rule.id] = rule.violation(address, xid)
        elif action[1] not in HARMLESS_ACTIONS:  # an earlier Xid has the reason
            rule = RULES["kernel.xid"]
            latest.setdefault((address, rule.id), rule.violation(address, f"{xid}: {action[1]}"))
    yield from (finding for (address, _), finding in latest.items() if address not in lost)


def _find_rule_matches(text: str, gpus: list[str], cards: list[str]) -> list[DoctorFinding]:
    """Return the last message of each device that a rule's patterns match.

    The kernel also reports devices as limited that are of no interest here, and idle GPUs, which reduce the speed of
    their link at boot, not its lanes.
    """
    latest: dict[tuple[str, str], DoctorFinding] = {}
    for rule in SECTIONS["kernel_log"].rules:
        for match in (match for pattern in rule.inputs for match in re.finditer(pattern, text)):
            groups = match.groupdict()
            device = groups.get("device") or ""
            latest[rule.id, device] = rule.violation(device, groups.get("what") or match[0])
    return [
        finding
        for finding in latest.values()
        if finding.id != "kernel.pcie_limited"
        or finding.device in cards
        or (finding.device in gpus and len(set(re.findall(r"x(\d+) link", str(finding.measured)))) > 1)
    ]

"""PCIe links of GPUs and network cards, from sysfs."""

from __future__ import annotations

import re

from phalanx.doctor.expectations import Expectations
from phalanx.doctor.finding import CheckRule, CheckSkipped, DoctorFinding, check_values
from phalanx.doctor.machine import Machine
from phalanx.doctor.probes import pci
from phalanx.doctor.probes.nvidia_smi import leading_number

WIDTH = CheckRule(
    id="pcie.width",
    quantity="lanes in use",
    severity="FAIL",
    threshold="the maximum of the device and its slot",
    unit="lanes",
    source="OCI (width 16)",
    remedy="drain the node; have {device} reseated, or put it into a slot with all lanes",
    command="lspci -s {device} -vv | grep -e LnkCap -e LnkSta",
)
SPEED = CheckRule(
    id="pcie.speed",
    quantity="speed of a network card's link (idle GPUs reduce theirs)",
    severity="FAIL",
    threshold="the maximum of the device and its slot",
    unit="GT/s",
    source="Imbue (available PCIe bandwidth, limited by ...)",
    remedy="have {device} reseated; check the slot's speed in the BIOS",
    command="lspci -s {device} -vv | grep -e LnkCap -e LnkSta",
)
ERRORS = CheckRule(
    id="pcie.errors",
    quantity="fatal and non-fatal errors since boot",
    severity="WARN",
    threshold="0",
    unit="errors",
    source="Linux, PCIe AER statistics; DCGM counts replays",
    remedy="run a benchmark; if the errors increase, have {device} reseated",
    command="cat /sys/bus/pci/devices/{device}/aer_dev_*fatal; dmesg | grep -i aer",
)
NUMA = CheckRule(
    id="pcie.numa",
    quantity="NUMA node of each device",
    severity="WARN",
    threshold="known, on machines with several",
    unit="",
    source="Linux (numa_node is -1 if the BIOS does not report it)",
    remedy="update the BIOS, or set the node; otherwise processes are bound to the wrong CPUs",
    command="cat /sys/bus/pci/devices/{device}/numa_node",
)
RULES = (WIDTH, SPEED, ERRORS, NUMA)
TOTAL_PATTERN = re.compile(r"^TOTAL_ERR_\w+ (\d+)", re.MULTILINE)


def check(machine: Machine, _: Expectations) -> list[DoctorFinding]:
    """Check NVIDIA GPUs, and network cards with RDMA."""
    cards = rdma_cards(machine)
    devices = [*pci.pci_devices(machine, pci.GPU, pci.NVIDIA), *cards]
    if not devices:
        raise CheckSkipped("no GPU and no RDMA card on the PCI bus")
    has_several_numa_nodes = len(machine.glob("/sys/devices/system/node/node[0-9]*")) > 1
    max_widths = {address: _max_supported(machine, address, "max_link_width") for address in devices}
    widths = {address: _read_number(machine, address, "current_link_width") for address in devices}
    max_speeds = {address: _max_supported(machine, address, "max_link_speed") for address in cards}
    speeds = {address: _read_number(machine, address, "current_link_speed") for address in cards}
    nodes = {address: machine.read(f"{pci.DEVICES}/{address}/numa_node") or "" for address in devices}
    counts = {address: errors(machine, address) for address in devices}
    error_counts = {address: count for address, count in counts.items() if count is not None}
    return [
        *_check_below_max(WIDTH, widths, max_widths),
        *_check_below_max(SPEED, speeds, max_speeds),
        *check_values(ERRORS, error_counts, lambda count: count > 0),
        *(check_values(NUMA, nodes, "-1".__eq__) if has_several_numa_nodes else [NUMA.skip("one NUMA node")]),
    ]


def rdma_cards(machine: Machine) -> list[str]:
    """Return the PCI addresses of cards with an RDMA device."""
    addresses = set()
    for path in machine.glob("/sys/class/infiniband/*"):
        match = re.search(r"^PCI_SLOT_NAME=(\S+)", machine.read(f"{path}/device/uevent") or "", re.MULTILINE)
        addresses |= {match[1]} if match else set()
    return sorted(addresses)


def errors(machine: Machine, address: str) -> int | None:
    """Return the fatal and non-fatal errors since boot, or None if uncounted (virtual machines)."""
    files = (machine.read(f"{pci.DEVICES}/{address}/aer_dev_{kind}") or "" for kind in ("nonfatal", "fatal"))
    totals = [int(total[1]) for total in map(TOTAL_PATTERN.search, files) if total]
    return sum(totals) if totals else None


def _read_number(machine: Machine, address: str, name: str) -> float:
    return leading_number(machine.read(f"{pci.DEVICES}/{address}/{name}") or "") or 0


def _max_supported(machine: Machine, address: str, name: str) -> float:
    """Return the maximum that both a device and its slot support."""
    bridge = pci.upstream_bridge(machine, address)
    values = [_read_number(machine, device, name) for device in (address, bridge) if device]
    return min((value for value in values if value > 0), default=0)


def _check_below_max(rule: CheckRule, used: dict[str, float], maxima: dict[str, float]) -> list[DoctorFinding]:
    """Check for devices below their maximum; virtual ones report 0 or nothing, and are ignored."""
    known = {address: value for address, value in used.items() if value > 0 and maxima[address] > 0}
    below = [
        rule.violation(address, value, f"{maxima[address]:g}")
        for address, value in known.items()
        if value < maxima[address]
    ]
    return below or check_values(rule, known, lambda _: False)

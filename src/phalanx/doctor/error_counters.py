"""Error counters before and after a benchmark: only errors that occur under load are findings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress

from phalanx.doctor.finding import CheckSkipped, DoctorFinding
from phalanx.doctor.machine import CommandTimeout, Machine
from phalanx.doctor.probes import nvidia_smi, pci, rdma
from phalanx.doctor.rules import RULES, SECTIONS

CounterSnapshot = dict[str, dict[str, int]]
"""Counts by rule, and by device and counter, such as "mlx5_0 symbol_error"."""
ETHTOOL_PATTERN = re.compile(r"^\s*(?:([rt]x_prio\d_pause)|(\w+_discards_phy|rx_out_of_buffer)): (\d+)$", re.MULTILINE)
PACKETS = "packets"
SEGMENTS = "segments"
"""Totals to which shares refer; they count no errors."""
DENOMINATORS = {"counters.ecn": PACKETS, "counters.tcp": SEGMENTS}


def read_counters(machine: Machine) -> CounterSnapshot:
    """Return all error counters of a machine."""
    counters: CounterSnapshot = {}
    for rule, device, count in _read_all_counters(machine):
        counters.setdefault(rule, {})[device] = count
    return counters


def counter_findings(before: CounterSnapshot, after: CounterSnapshot) -> list[DoctorFinding]:
    """Return the findings on the growth of counters.

    A counter below its earlier value was reset. A counter without an earlier value is ignored.
    """
    growth: CounterSnapshot = {rule: {} for rule in after}
    for rule_id, counters in after.items():
        for name, count in counters.items():
            if (earlier := before.get(rule_id, {}).get(name)) is not None:
                growth[rule_id][name] = count - earlier if count >= earlier else count
    findings = []
    for rule in SECTIONS["counters"].rules:
        counts = growth.get(rule.id)
        if not counts:
            findings.append(rule.skip("the machine has no such counters"))
        elif rule.id in DENOMINATORS:
            totals = growth.get(DENOMINATORS[rule.id], {})
            shares = {name: count / max(1, totals.get(name, 0)) for name, count in counts.items()}
            high = ((name, float(f"{share:.2g}")) for name, share in shares.items() if share > rule.limit)
            findings += rule.report(high, ok=float(f"{max(shares.values()):.2g}"))
        else:
            findings += rule.report(((name, count) for name, count in counts.items() if count > rule.limit), ok=0)
    return findings


def _read_all_counters(machine: Machine) -> Iterator[tuple[str, str, int]]:
    for name, port in rdma.rdma_ports(machine).items():
        for rule in ("counters.link", "counters.resent"):
            for counter in RULES[rule].inputs:
                label = f"{name} {counter.rpartition('/')[2]}"
                yield from _read_counter(machine, rule, label, f"{port.path}/{counter}")
        (marked_packets,) = RULES["counters.ecn"].inputs
        yield from _read_counter(machine, "counters.ecn", name, f"{port.path}/{marked_packets}")
        yield from _read_counter(machine, PACKETS, name, f"{port.path}/counters/port_rcv_packets")
        if port.roce and port.interface:
            yield from _read_ethtool_counters(machine, port.interface)
    for path in machine.glob("/sys/class/net/*/device"):  # hardware and virtual machines
        name = path.split("/")[4]
        for counter in RULES["counters.dropped"].inputs:
            file = f"/sys/class/net/{name}/statistics/{counter}"
            yield from _read_counter(machine, "counters.dropped", f"{name} {counter}", file)
    for address in [*pci.nvidia_gpus(machine), *rdma.rdma_cards(machine)]:
        errors = pci.pcie_errors(machine, address)
        if errors is not None:
            yield "counters.pcie", address, errors
    yield from _read_gpu_counters(machine)
    yield from _read_tcp_counters(machine)


def _read_counter(machine: Machine, rule: str, name: str, path: str) -> Iterator[tuple[str, str, int]]:
    text = machine.read(path)
    if text is not None and text.isdecimal():
        yield rule, name, int(text)


def _read_ethtool_counters(machine: Machine, interface: str) -> Iterator[tuple[str, str, int]]:
    try:
        output = machine.run(f"ethtool_{interface}", "ethtool", "-S", interface)
    except CommandTimeout:  # before or after: the growth is unknown
        return
    for pause, dropped, count in ETHTOOL_PATTERN.findall(output.text if output else ""):
        yield "counters.pause" if pause else "counters.dropped", f"{interface} {pause or dropped}", int(count)


def _read_gpu_counters(machine: Machine) -> Iterator[tuple[str, str, int]]:
    with suppress(CheckSkipped):
        for link, count in nvidia_smi.nvlink_errors(machine).items():
            yield "counters.nvlink", link, count
    with suppress(CheckSkipped):
        field = nvidia_smi.UNCORRECTED_ECC_FIELD
        rows = nvidia_smi.query_gpus(machine, "smi_uncorrected", "gpu", "index", field)
        for gpu, errors in nvidia_smi.numeric_field(rows, field).items():
            yield "counters.ecc", gpu, int(errors)


def _read_tcp_counters(machine: Machine) -> Iterator[tuple[str, str, int]]:
    """Yield the TCP counters of this host or its network namespace."""
    lines = [line.split() for line in (machine.read("/proc/net/snmp") or "").splitlines() if line.startswith("Tcp:")]
    if len(lines) == 2:
        values = dict(zip(*lines, strict=False))
        for rule, counter in (("counters.tcp", "RetransSegs"), (SEGMENTS, "OutSegs")):
            if values.get(counter, "").isdecimal():
                yield rule, "tcp", int(values[counter])

"""Error counters before and after a benchmark: only errors that occur under load are findings."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress

from phalanx.doctor.checks import nvlink, pcie, rdma_ports
from phalanx.doctor.finding import CheckRule, CheckSkipped, DoctorFinding
from phalanx.doctor.machine import CommandTimeout, Machine
from phalanx.doctor.probes import nvidia_smi, pci

CounterSnapshot = dict[str, dict[str, int]]
"""Counts by rule, and by device and counter, such as "mlx5_0 symbol_error"."""
MAX_MARKED_SHARE = 1e-3
MAX_RESENT_SHARE = 1e-2
LINK = CheckRule(
    id="counters.link",
    quantity="errors of RDMA links in the benchmark",
    severity="FAIL",
    threshold="0",
    unit="errors",
    source="NVRx (link_downed), OCI (raw BER)",
    remedy="clean or replace cable and transceiver of {device}",
    command="mlxlink -d DEVICE -c; cat /sys/class/infiniband/*/ports/*/counters/*",
)
RESENT = CheckRule(
    id="counters.resent",
    quantity="packets lost and retransmitted over RDMA in the benchmark",
    severity="WARN",
    threshold="0",
    unit="packets",
    source="NVIDIA, hw_counters (out_of_sequence and similar)",
    remedy="the fabric drops packets: check PFC, ECN and the priority on every switch",
    command="cat /sys/class/infiniband/*/ports/*/hw_counters/*",
)
MARKED = CheckRule(
    id="counters.ecn",
    quantity="share of received packets with an ECN mark in the benchmark",
    severity="WARN",
    threshold=f"at most {MAX_MARKED_SHARE:g}",
    unit="of packets",
    source="ours: each mark slows senders down (DCQCN)",
    remedy="look for a congested link: many to one, or rails that cross the spine",
    command="phalanx placement RUN.toml; cat /sys/class/infiniband/*/ports/*/hw_counters/np_*",
)
PAUSED = CheckRule(
    id="counters.pause",
    quantity="received (rx) or sent (tx) pause frames in the benchmark",
    severity="WARN",
    threshold="0",
    unit="frames",
    source="NVIDIA, DCQCN (ECN should act before PFC)",
    remedy="rx: the switch paused {device}: check for a slow receiver, and for ECN on the path; tx: this host is "
    "a slow receiver: check the PCIe link and NUMA node of its card",
    command="ethtool -S INTERFACE | grep pause",
)
DROPPED = CheckRule(
    id="counters.dropped",
    quantity="packets dropped or corrupted at an interface in the benchmark",
    severity="WARN",
    threshold="0",
    unit="packets",
    source="Linux (statistics of interfaces)",
    remedy="check cable and buffers of {device}",
    command="ethtool -S INTERFACE | grep -e discard -e err -e drop",
)
PCIE = CheckRule(
    id="counters.pcie",
    quantity="uncorrected PCIe errors in the benchmark",
    severity="FAIL",
    threshold="0",
    unit="errors",
    source="Linux, PCIe AER; DCGM",
    remedy="drain the node and have {device} reseated",
    command="cat /sys/bus/pci/devices/*/aer_dev_*",
)
NVLINK = CheckRule(
    id="counters.nvlink",
    quantity="errors of NVLinks in the benchmark",
    severity="FAIL",
    threshold="0",
    unit="errors",
    source="GCM (any error > 0)",
    remedy="drain the node; reset {device}, then have it reseated",
    command="nvidia-smi nvlink -e",
)
ECC = CheckRule(
    id="counters.ecc",
    quantity="uncorrectable ECC errors in the benchmark",
    severity="FAIL",
    threshold="0",
    unit="errors",
    source="Imbue, GCM",
    remedy="drain the node and replace {device}",
    command="nvidia-smi -q -d ECC",
)
TCP = CheckRule(
    id="counters.tcp",
    quantity="share of retransmitted TCP segments in the benchmark",
    severity="WARN",
    threshold=f"at most {MAX_RESENT_SHARE:g}",
    unit="of segments",
    source="ours: TCP halves its speed at each loss",
    remedy="the network drops packets: check cables, MTU and the switch",
    command="nstat -az TcpRetransSegs",
)
RULES = (LINK, RESENT, MARKED, PAUSED, DROPPED, PCIE, NVLINK, ECC, TCP)
LINK_COUNTERS = (
    "symbol_error",
    "link_error_recovery",
    "link_downed",
    "port_rcv_errors",
    "local_link_integrity_errors",
    "excessive_buffer_overrun_errors",
)
LOSS_COUNTERS = (
    "out_of_sequence",
    "packet_seq_err",
    "local_ack_timeout_err",
    "rnr_nak_retry_err",
    "implied_nak_seq_err",
    "roce_adp_retrans",
)
INTERFACE_COUNTERS = ("rx_errors", "tx_errors", "rx_crc_errors")
ETHTOOL_PATTERN = re.compile(r"^\s*(?:([rt]x_prio\d_pause)|(\w+_discards_phy|rx_out_of_buffer)): (\d+)$", re.MULTILINE)
PACKETS = "packets"
SEGMENTS = "segments"
"""Totals to which shares refer; they count no errors."""
UNCORRECTED_ECC_FIELD = "ecc.errors.uncorrected.volatile.total"


def read_counters(machine: Machine) -> CounterSnapshot:
    """Return all error counters of a machine."""
    counters: CounterSnapshot = {}
    for rule, device, count in _read_all(machine):
        counters.setdefault(rule, {})[device] = count
    return counters


def counter_findings(before: CounterSnapshot, after: CounterSnapshot) -> list[DoctorFinding]:
    """Return the findings on the growth of counters.

    A counter below its earlier value was reset. A counter without an earlier value is ignored.
    """
    differences = {rule: _growth(before.get(rule, {}), counts) for rule, counts in after.items()}
    findings = []
    for rule in RULES:
        counts = differences.get(rule.id)
        if not counts:
            findings.append(rule.skip("the machine has no such counters"))
        elif rule in (MARKED, TCP):
            findings += _check_shares(rule, counts, differences)
        else:
            findings += [rule.violation(name, count) for name, count in counts.items() if count > 0] or [rule.ok(0)]
    return findings


def _check_shares(
    rule: CheckRule, counts: Mapping[str, int], all_counts: Mapping[str, Mapping[str, int]]
) -> Iterable[DoctorFinding]:
    denominator, max_share = (PACKETS, MAX_MARKED_SHARE) if rule is MARKED else (SEGMENTS, MAX_RESENT_SHARE)
    shares = {name: count / max(1, all_counts.get(denominator, {}).get(name, 0)) for name, count in counts.items()}
    wrong = [rule.violation(name, float(f"{share:.2g}")) for name, share in shares.items() if share > max_share]
    return wrong or [rule.ok(float(f"{max(shares.values()):.2g}"))]


def _read_all(machine: Machine) -> Iterator[tuple[str, str, int]]:
    for name, port in rdma_ports.rdma_ports(machine).items():
        for rule, directory, counters in ((LINK, "counters", LINK_COUNTERS), (RESENT, "hw_counters", LOSS_COUNTERS)):
            for counter in counters:
                yield from _read_counter(
                    machine, rule.id, f"{name} {counter}", path=f"{port.path}/{directory}/{counter}"
                )
        yield from _read_counter(machine, MARKED.id, name, path=f"{port.path}/hw_counters/np_ecn_marked_roce_packets")
        yield from _read_counter(machine, PACKETS, name, path=f"{port.path}/counters/port_rcv_packets")
        if port.roce and port.interface:
            yield from _read_ethtool_counters(machine, port.interface)
    for path in machine.glob("/sys/class/net/*/device"):  # hardware and virtual machines
        name = path.split("/")[4]
        for counter in INTERFACE_COUNTERS:
            yield from _read_counter(
                machine, DROPPED.id, f"{name} {counter}", path=f"/sys/class/net/{name}/statistics/{counter}"
            )
    for address in [*pci.pci_devices(machine, pci.GPU, pci.NVIDIA), *pcie.rdma_cards(machine)]:
        errors = pcie.errors(machine, address)
        if errors is not None:
            yield PCIE.id, address, errors
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
        yield (PAUSED if pause else DROPPED).id, f"{interface} {pause or dropped}", int(count)


def _read_gpu_counters(machine: Machine) -> Iterator[tuple[str, str, int]]:
    with suppress(CheckSkipped):
        for link, count in nvlink.errors(machine).items():
            yield NVLINK.id, link, count
    with suppress(CheckSkipped):
        rows = nvidia_smi.query_gpus(machine, "smi_uncorrected", "gpu", "index", UNCORRECTED_ECC_FIELD)
        for gpu, errors in nvidia_smi.numeric_field(rows, UNCORRECTED_ECC_FIELD).items():
            yield ECC.id, gpu, int(errors)


def _read_tcp_counters(machine: Machine) -> Iterator[tuple[str, str, int]]:
    """Yield the TCP counters of this host or its network namespace."""
    lines = [line.split() for line in (machine.read("/proc/net/snmp") or "").splitlines() if line.startswith("Tcp:")]
    if len(lines) == 2:
        values = dict(zip(*lines, strict=False))
        for rule, counter in ((TCP.id, "RetransSegs"), (SEGMENTS, "OutSegs")):
            if values.get(counter, "").isdecimal():
                yield rule, "tcp", int(values[counter])


def _growth(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    """Return the growth of each counter that has an earlier value."""
    growth = {}
    for name, count in after.items():
        if name in before:
            growth[name] = count - before[name] if count >= before[name] else count
    return growth

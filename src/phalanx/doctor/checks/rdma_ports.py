"""RDMA devices and their ports, from sysfs, which needs no tool and works in containers."""

from __future__ import annotations

import re
from dataclasses import dataclass

from phalanx.doctor.expectations import Expectations
from phalanx.doctor.finding import CheckRule, CheckSkipped, DoctorFinding, check_values, most_common
from phalanx.doctor.machine import Machine
from phalanx.doctor.probes.nvidia_smi import leading_number

NO_DEVICE = "no RDMA device"
NOT_USED = "a run for CPUs uses no RDMA"
ROOT = "/sys/class/infiniband"
MAX_FLAPS = 5
"""AZNHC: more than 5 link flaps in 24 h."""
DAY_SECONDS = 86400
MIN_RATE_RATIO = 0.99
STATE = CheckRule(
    id="rdma.state",
    quantity="state of each port",
    severity="FAIL",
    threshold="4: ACTIVE, 5: LinkUp",
    unit="",
    source="GCM, OCI",
    remedy="check cable and transceiver of {device}, and its switch port; exclude it with NCCL_IB_HCA until then",
    command="cat /sys/class/infiniband/*/ports/*/{state,phys_state}; mlxlink -d {device}",
)
RATE = CheckRule(
    id="rdma.rate",
    quantity="rate of each port",
    severity="FAIL",
    threshold="that of the others, and the run's network speed",
    unit="Gb/s",
    source="AZNHC (rate 400), OCI",
    remedy="check cable, transceiver and switch port of {device}; exclude cards for storage with NCCL_IB_HCA",
    command="cat /sys/class/infiniband/*/ports/*/rate; mlxlink -d {device}",
)
FLAPPING = CheckRule(
    id="rdma.flaps",
    quantity="link-down events per 24 h since boot",
    severity="WARN",
    threshold=f"at most {MAX_FLAPS}",
    unit="flaps",
    source="AZNHC (> 5 flaps in 24 h)",
    remedy="clean or replace cable and transceiver of {device}",
    command="cat /sys/class/infiniband/*/ports/*/counters/link_downed",
)
FIRMWARE = CheckRule(
    id="rdma.firmware",
    quantity="firmware of cards of one model",
    severity="WARN",
    threshold="equal",
    unit="",
    source="Primus, GCM (manifest)",
    remedy="update {device} to the firmware of the others",
    command="mlxfwmanager --query",
)
RULES = (STATE, RATE, FLAPPING, FIRMWARE)


@dataclass(frozen=True, kw_only=True)
class Port:
    """A port of an RDMA device."""

    device: str
    number: str
    roce: bool
    """True if the port is over Ethernet."""
    interface: str | None
    """The port's Ethernet interface, or that of IP over InfiniBand."""

    @property
    def path(self) -> str:
        """The port's directory in sysfs."""
        return f"{ROOT}/{self.device}/ports/{self.number}"


def rdma_devices(machine: Machine) -> list[str]:
    """Return the names of the RDMA devices, such as mlx5_0."""
    return [path.rpartition("/")[2] for path in machine.glob(f"{ROOT}/*")]


def rdma_ports(machine: Machine) -> dict[str, Port]:
    """Return every port by its name: mlx5_0, or mlx5_0:2 for further ports of a device."""
    ports = {}
    for device in rdma_devices(machine):
        interfaces = [path.rpartition("/")[2] for path in machine.glob(f"{ROOT}/{device}/device/net/*")]
        for path in machine.glob(f"{ROOT}/{device}/ports/*"):
            number = path.rpartition("/")[2]
            roce = machine.read(f"{path}/link_layer") == "Ethernet"
            name = device if number == "1" else f"{device}:{number}"
            ports[name] = Port(device=device, number=number, roce=roce, interface=interfaces[0] if interfaces else None)
    return ports


def selected_ports(machine: Machine, expected: Expectations) -> dict[str, Port]:
    """Return the ports that the run would use.

    They are the ports that NCCL_IB_HCA names, else those of the fastest kinds of card: slower ones are for storage and
    logins.

    Raises:
        CheckSkipped: The machine has no ports, or the run is for CPUs, which use none.
    """
    ports = rdma_ports(machine)
    if not ports:
        raise CheckSkipped(NO_DEVICE)
    if expected.gpus == 0:
        raise CheckSkipped(NOT_USED)
    hca_filter = machine.environment.get("NCCL_IB_HCA", "")
    if hca_filter:
        return {name: port for name, port in ports.items() if matches_hca_filter(hca_filter, port)}
    kinds = {name: _card_kind(machine, port) for name, port in ports.items()}
    rates = {name: _read_rate_gbps(machine, port) for name, port in ports.items()}
    fastest = {kinds[name] for name, rate in rates.items() if rate == max(rates.values())}
    return {name: port for name, port in ports.items() if kinds[name] in fastest}


def roce_interfaces(machine: Machine, expected: Expectations) -> dict[str, Port]:
    """Return the interfaces of RoCE ports that the run would use.

    Raises:
        CheckSkipped: The machine has no RoCE port, or shows no interface of one.
    """
    roce = [port for port in selected_ports(machine, expected).values() if port.roce]
    interfaces = {port.interface: port for port in roce if port.interface}
    if not interfaces:
        raise CheckSkipped("RoCE ports have no interface here (in a container?)" if roce else "no RoCE port")
    return interfaces


def _read_rate_gbps(machine: Machine, port: Port) -> float:
    """Return the rate of a port in Gb/s, or 0 if it is unknown."""
    return leading_number(machine.read(f"{port.path}/rate") or "") or 0.0


def _card_kind(machine: Machine, port: Port) -> str:
    """Return the model of a port's card, as its vendor names it."""
    return machine.read(f"{ROOT}/{port.device}/board_id") or ""


def matches_hca_filter(hca_filter: str, port: Port) -> bool:
    """Return whether a list in the format of NCCL_IB_HCA selects a port (NCCL's documentation).

    The list contains names or prefixes of names; after = exact names; after ^ the names that are excluded.
    """
    entries = [name.partition(":") for name in hca_filter.lstrip("^=").split(",") if name]
    exact = "=" in hca_filter[:2]
    matches = any(
        (port.device == name if exact else port.device.startswith(name)) and number in ("", port.number)
        for name, _, number in entries
    )
    return matches != hca_filter.startswith("^")


def check(machine: Machine, expected: Expectations) -> list[DoctorFinding]:
    """Check state and speed of the ports that the run would use, and report the others as skipped."""
    ports = selected_ports(machine, expected)
    states = {name: _read_joined(machine, port, "state", "phys_state") for name, port in ports.items()}
    up = {name: port for name, port in ports.items() if states[name].startswith("4:")}
    rates = {name: _read_rate_gbps(machine, port) for name, port in up.items()}
    expected_gbps = max(_required_gbps(expected, len(ports)), most_common(rates.values()) or 0.0)
    days = max(1.0, (leading_number(machine.read("/proc/uptime") or "") or 0) / DAY_SECONDS)
    link_downs = {
        name: leading_number(machine.read(f"{port.path}/counters/link_downed") or "") for name, port in ports.items()
    }
    flaps_per_day = {name: round(count / days, 1) for name, count in link_downs.items() if count is not None}
    return [
        *_skipped_ports(machine, ports),
        *check_values(STATE, states, lambda state: not re.match(r"4:.*5:", state)),
        *check_values(
            RATE, rates, lambda rate: rate < MIN_RATE_RATIO * expected_gbps, threshold=f"at least {expected_gbps:g}"
        ),
        *check_values(FLAPPING, flaps_per_day, lambda count: count > MAX_FLAPS),
        *_check_firmware(machine, ports),
    ]


def _skipped_ports(machine: Machine, ports: dict[str, Port]) -> list[DoctorFinding]:
    excluded = [name for name in rdma_ports(machine) if name not in ports]
    reason = "not named by NCCL_IB_HCA" if machine.environment.get("NCCL_IB_HCA") else "slower than other kinds of card"
    return [STATE.skip(f"{', '.join(excluded)}: {reason}")] if excluded else []


def _read_joined(machine: Machine, port: Port, *names: str) -> str:
    return ", ".join(machine.read(f"{port.path}/{name}") or "unknown" for name in names)


def _required_gbps(expected: Expectations, cards: int) -> float:
    """Return the rate in Gb/s that each card needs for the network speed of the run's cluster."""
    speed = expected.network_bytes_per_second
    ranks = expected.ranks
    return 8e-9 * speed * ranks / cards if speed and ranks and cards else 0.0


def _check_firmware(machine: Machine, ports: dict[str, Port]) -> list[DoctorFinding]:
    firmware = {port.device: machine.read(f"{ROOT}/{port.device}/fw_ver") for port in ports.values()}
    versions = {device: version for device, version in firmware.items() if version}
    kinds = {port.device: _card_kind(machine, port) for port in ports.values()}
    common = {
        kind: most_common(versions[device] for device in versions if kinds[device] == kind) for kind in kinds.values()
    }
    other = [
        FIRMWARE.violation(device, version, common[kinds[device]] or "")
        for device, version in versions.items()
        if version != common[kinds[device]]
    ]
    return other or check_values(FIRMWARE, versions, lambda _: False)

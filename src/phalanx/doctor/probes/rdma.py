"""RDMA devices and their ports, from sysfs, which needs no tool and works in containers."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.doctor.expectations import Expectations
from phalanx.doctor.finding import CheckSkipped
from phalanx.doctor.machine import Machine
from phalanx.doctor.probes.text import first_match, leading_number

NO_DEVICE = "no RDMA device"
NOT_USED = "a run for CPUs uses no RDMA"
ROOT = "/sys/class/infiniband"


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


def rdma_cards(machine: Machine) -> list[str]:
    """Return the PCI addresses of cards with an RDMA device."""
    uevents = (machine.read(f"{ROOT}/{device}/device/uevent") for device in rdma_devices(machine))
    return sorted({address for text in uevents if (address := first_match(r"^PCI_SLOT_NAME=(\S+)", text))})


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
    logins. Raises CheckSkipped if the machine has no ports, or the run is for CPUs, which use none.
    """
    ports = rdma_ports(machine)
    if not ports:
        raise CheckSkipped(NO_DEVICE)
    if expected.gpus == 0:
        raise CheckSkipped(NOT_USED)
    hca_filter = machine.environment.get("NCCL_IB_HCA", "")
    if hca_filter:
        return {name: port for name, port in ports.items() if matches_hca_filter(hca_filter, port)}
    kinds = {name: card_kind(machine, port) for name, port in ports.items()}
    rates = {name: rate_gbps(machine, port) for name, port in ports.items()}
    fastest = {kinds[name] for name, rate in rates.items() if rate == max(rates.values())}
    return {name: port for name, port in ports.items() if kinds[name] in fastest}


def roce_interfaces(machine: Machine, expected: Expectations) -> dict[str, Port]:
    """Return the interfaces of RoCE ports that the run would use.

    Raises CheckSkipped if the machine has no RoCE port, or shows no interface of one.
    """
    roce = [port for port in selected_ports(machine, expected).values() if port.roce]
    interfaces = {port.interface: port for port in roce if port.interface}
    if not interfaces:
        raise CheckSkipped("RoCE ports have no interface here (in a container?)" if roce else "no RoCE port")
    return interfaces


def rate_gbps(machine: Machine, port: Port) -> float:
    """Return the rate of a port in Gb/s, or 0 if it is unknown."""
    return leading_number(machine.read(f"{port.path}/rate")) or 0.0


def card_kind(machine: Machine, port: Port) -> str:
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

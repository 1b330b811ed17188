"""Hosts on one machine: Linux network namespaces around a hub, with links of a given speed.

Interfaces and TCP are the kernel's own; only the speed is simulated, by a token bucket at both ends of each link (`tc
tbf`), one for each direction. Links can be disconnected. It requires root and the tools of iproute2."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

NETNS_CONFIG = Path("/etc/netns")
BUCKET_SIZE = "64kb"
MAX_LATENCY = "1s"
"""Maximum time for which a token bucket queues data before dropping it; `BUCKET_SIZE` is its burst."""


class NamespacesUnavailable(OSError):  # noqa: N818 - a fact about the machine
    """The process may not create networks, or a tool is missing."""


@dataclass(frozen=True, kw_only=True)
class Host:
    """A host: a network namespace, and the host's link to the hub."""

    name: str
    namespace: str
    address: str
    """The host's address on its link."""
    hub: str
    """The hub's address on that link."""
    interface: str
    """Name of the host's interface. The hub's end of the link has the same name with the prefix "h"."""

    @property
    def prefix(self) -> list[str]:
        """Prefix of a command that runs on the host."""
        return ["ip", "netns", "exec", self.namespace]


@dataclass(frozen=True)
class StarNetwork:
    """Hosts around a hub; the hub and the hosts can reach each other."""

    hub: Host
    hosts: dict[str, Host]

    def disconnect(self, name: str) -> None:
        """Block all traffic of a host; connections notice it only by missing data."""
        self._set_link_state(name, "down")

    def reconnect(self, name: str) -> None:
        """Restore the traffic of a host."""
        self._set_link_state(name, "up")

    def _set_link_state(self, name: str, state: str) -> None:
        _run_command([*self.hub.prefix, "ip", "link", "set", f"h{self.hosts[name].interface}", state])

    def shape(self, name: str, up_mbit: float, down_mbit: float) -> None:
        """Set the speed of a host's link."""
        host = self.hosts[name]
        ends = (host.prefix, host.interface, up_mbit), (self.hub.prefix, f"h{host.interface}", down_mbit)
        for prefix, end, speed in ends:
            bucket = ["tbf", "rate", f"{speed}mbit", "burst", BUCKET_SIZE, "latency", MAX_LATENCY]
            _run_command([*prefix, "tc", "qdisc", "replace", "dev", end, "root", *bucket])


@contextmanager
def star_network(
    names: Sequence[str], up_mbit: float | None = None, down_mbit: float | None = None
) -> Iterator[StarNetwork]:
    """Create hosts on links of a given speed, and delete them on exit.

    Processes on the hosts must have exited by then. Without a speed, links from hosts are unlimited, and those to hosts
    have the speed of those from hosts. Raises NamespacesUnavailable if the hosts cannot be created.
    """
    pid = os.getpid()
    hub = Host(name="hub", namespace=f"phalanx-{pid}-hub", address="", hub="", interface="")
    hosts = {
        name: Host(
            name=name,
            namespace=f"phalanx-{pid}-{number}",
            address=f"10.77.{number}.2",
            hub=f"10.77.{number}.1",
            interface=f"p{pid}n{number}",
        )
        for number, name in enumerate(names)
    }
    network = StarNetwork(hub, hosts)
    try:
        _run_command(["ip", "netns", "add", hub.namespace])
        _run_command([*hub.prefix, "ip", "link", "set", "lo", "up"])
        for name, host in hosts.items():
            _connect_host(hub, host)
            _write_host_names(host, hosts.values())
            if up_mbit is not None:
                network.shape(name, up_mbit, up_mbit if down_mbit is None else down_mbit)
        yield network
    finally:
        for host in (hub, *hosts.values()):
            subprocess.run(["ip", "netns", "delete", host.namespace], capture_output=True, check=False)
            shutil.rmtree(NETNS_CONFIG / host.namespace, ignore_errors=True)


def _connect_host(hub: Host, host: Host) -> None:
    """Create a host, and a link between it and the hub."""
    _run_command(["ip", "netns", "add", host.namespace])
    host_end = host.interface
    hub_end = f"h{host.interface}"
    peer = ["peer", "name", hub_end, "netns", hub.namespace]
    _run_command(["ip", "link", "add", host_end, "netns", host.namespace, "type", "veth", *peer])
    _run_command([*host.prefix, "ip", "link", "set", "lo", "up"])
    for prefix, interface, address in ((host.prefix, host_end, host.address), (hub.prefix, hub_end, host.hub)):
        _run_command([*prefix, "ip", "address", "add", f"{address}/24", "dev", interface])
        _run_command([*prefix, "ip", "link", "set", interface, "up"])
    _run_command([*host.prefix, "ip", "route", "add", "default", "via", host.hub])
    _run_command([*hub.prefix, "sysctl", "-qw", "net.ipv4.ip_forward=1"])


def _write_host_names(host: Host, hosts: Iterable[Host]) -> None:
    """Write host names that resolve without a name server.

    `ip netns exec` mounts these files over the machine's. A host's own name resolves to its loopback address, as with
    Debian's installer."""
    directory = NETNS_CONFIG / host.namespace
    directory.mkdir(parents=True, exist_ok=True)
    names = [f"{other.address} {other.name}" for other in hosts if other is not host]
    (directory / "hosts").write_text("\n".join(["127.0.0.1 localhost", f"127.0.1.1 {host.name}", *names, ""]))
    (directory / "nsswitch.conf").write_text("hosts: files\n")


def _run_command(command: Sequence[str]) -> None:
    command_text = " ".join(command)
    if not shutil.which(command[0]):
        raise NamespacesUnavailable(f"{command[0]} is not installed (apt-get install iproute2)")
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise NamespacesUnavailable(f"{command_text}: {result.stderr.strip()}")

"""Link speed of the interface by which sockets reach other nodes."""

from __future__ import annotations

from phalanx.doctor.checks import rdma_ports
from phalanx.doctor.checks.nccl_variables import named_interfaces
from phalanx.doctor.expectations import Expectations
from phalanx.doctor.finding import CheckRule, CheckSkipped, DoctorFinding, check_values
from phalanx.doctor.machine import Machine
from phalanx.doctor.probes.nvidia_smi import leading_number

MIN_MBPS = 1000
SPEED = CheckRule(
    id="network.speed",
    quantity="link of the interface that sockets use",
    severity="WARN",
    threshold=f"at least {MIN_MBPS}, and without RDMA the run's network speed",
    unit="Mb/s",
    source="ours: current cables carry that (1000BASE-T); the run (cluster.network_bytes_per_second)",
    remedy="check cable and switch port of {device}: with a broken pair of wires a link falls back to 100 Mb/s",
    command="ethtool {device}",
)
DUPLEX = CheckRule(
    id="network.duplex",
    quantity="duplex of that link",
    severity="WARN",
    threshold="full",
    unit="",
    source="Linux (duplex of interfaces)",
    remedy="enable autonegotiation at both ends of {device}: with one end only, the link is half duplex",
    command="ethtool {device}",
)
RULES = (SPEED, DUPLEX)


def check(machine: Machine, expected: Expectations) -> list[DoctorFinding]:
    """Check the interfaces that NCCL or gloo variables select, else that of the default route.

    The variables are NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME. Virtual machines and radio links report no speed.
    """
    if expected.nodes == 1:
        raise CheckSkipped("the run has one node")
    names = named_interfaces(machine) or _default_route_interfaces(machine)
    if not names:
        raise CheckSkipped("no variable names an interface, and no default route exists")
    all_speeds = {name: leading_number(machine.read(f"/sys/class/net/{name}/speed") or "") or 0.0 for name in names}
    speeds = {name: speed for name, speed in all_speeds.items() if speed > 0}
    duplex = {name: machine.read(f"/sys/class/net/{name}/duplex") or "" for name in speeds}
    min_mbps = max(MIN_MBPS, _required_mbps(machine, expected))
    return [
        *check_values(SPEED, speeds, lambda speed: speed < min_mbps, threshold=f"at least {min_mbps:g}"),
        *check_values(DUPLEX, duplex, "half".__eq__),
    ]


def _default_route_interfaces(machine: Machine) -> list[str]:
    """Return the interface of the default route, whose destination in /proc/net/route is all zeros."""
    rows = [line.split() for line in (machine.read("/proc/net/route") or "").splitlines()]
    return [row[0] for row in rows if row[1:2] == ["00000000"]][:1]


def _required_mbps(machine: Machine, expected: Expectations) -> float:
    speed = expected.network_bytes_per_second
    ranks = expected.ranks
    uses_rdma = rdma_ports.rdma_devices(machine) and expected.gpus != 0
    return 8e-6 * speed * ranks if speed and ranks and not uses_rdma else 0.0

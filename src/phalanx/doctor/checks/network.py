"""The interface by which sockets reach other nodes: how fast its link is."""

from __future__ import annotations

from phalanx.doctor.checks import rdma_ports
from phalanx.doctor.checks.nccl_variables import named_interfaces
from phalanx.doctor.expectations import Expectations
from phalanx.doctor.finding import CheckRule, CheckSkipped, DoctorFinding, check_values
from phalanx.doctor.machine import Machine
from phalanx.doctor.probes.nvidia_smi import leading_number

MIN_MBPS = 1000
SPEED = CheckRule(
    "network.speed",
    "link of the interface that sockets use",
    "WARN",
    threshold=f"at least {MIN_MBPS}, and without RDMA what the run counts on",
    unit="Mb/s",
    source="ours: cables of today carry that (1000BASE-T); the run (cluster.network_bytes_per_second)",
    remedy="look at cable and switch port of {device}: with a broken pair of wires a link falls to 100 Mb/s",
    command="ethtool {device}",
)
DUPLEX = CheckRule(
    "network.duplex",
    "duplex of that link",
    "WARN",
    threshold="full",
    unit="",
    source="Linux (duplex of interfaces)",
    remedy="let both ends of {device} negotiate: one whose other end does not falls to half",
    command="ethtool {device}",
)
RULES = (SPEED, DUPLEX)


def check(machine: Machine, expected: Expectations) -> list[DoctorFinding]:
    """Those that NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME take, else that of the default route. Virtual machines and
    radio links do not say how fast they are."""
    if expected.nodes == 1:
        raise CheckSkipped("the run has one node")
    names = named_interfaces(machine) or _default_route_interfaces(machine)
    if not names:
        raise CheckSkipped("no interface is named, and there is no default route")
    all_speeds = {name: leading_number(machine.read(f"/sys/class/net/{name}/speed") or "") or 0.0 for name in names}
    speeds = {name: speed for name, speed in all_speeds.items() if speed > 0}
    duplex = {name: machine.read(f"/sys/class/net/{name}/duplex") or "" for name in speeds}
    min_mbps = max(MIN_MBPS, _required_mbps(machine, expected))
    return [
        *check_values(SPEED, speeds, lambda speed: speed < min_mbps, threshold=f"at least {min_mbps:g}"),
        *check_values(DUPLEX, duplex, "half".__eq__),
    ]


def _default_route_interfaces(machine: Machine) -> list[str]:
    """By /proc/net/route: its interface, and all zeros as destination."""
    rows = [line.split() for line in (machine.read("/proc/net/route") or "").splitlines()]
    return [row[0] for row in rows if row[1:2] == ["00000000"]][:1]


def _required_mbps(machine: Machine, expected: Expectations) -> float:
    speed = expected.network_bytes_per_second
    ranks = expected.ranks
    uses_rdma = rdma_ports.rdma_devices(machine) and expected.gpus != 0
    return 8e-6 * speed * ranks if speed and ranks and not uses_rdma else 0.0

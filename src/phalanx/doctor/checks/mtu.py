"""MTU of RoCE interfaces: an RDMA packet must fit into an Ethernet packet."""

from __future__ import annotations

from phalanx.doctor.checks import rdma_ports
from phalanx.doctor.expectations import Expectations
from phalanx.doctor.finding import CheckRule, DoctorFinding, check_values, most_common
from phalanx.doctor.machine import Machine
from phalanx.doctor.probes.nvidia_smi import leading_number

MIN_MTU = 4200
"""RDMA's 4096 bytes and its headers. Ethernet's usual 1500 bytes allow RDMA packets of 1024 bytes."""
LARGE = CheckRule(
    id="mtu.large",
    quantity="MTU of the interfaces of RoCE ports",
    severity="WARN",
    threshold=f"at least {MIN_MTU}",
    unit="bytes",
    source="NVIDIA, RoCE (RDMA MTU 4096 needs 4200)",
    remedy="set the MTU of {device} to 9000, on its switch port too",
    command="ip link set {device} mtu 9000",
)
SAME = CheckRule(
    id="mtu.same",
    quantity="MTU of the interfaces of RoCE ports",
    severity="FAIL",
    threshold="equal to the others",
    unit="bytes",
    source="Primus (MTU drift against the majority)",
    remedy="set the MTU of {device} to that of the others",
    command="ip link set {device} mtu 9000",
)
RULES = (LARGE, SAME)


def check(machine: Machine, expected: Expectations) -> list[DoctorFinding]:
    """Check the interfaces of RoCE ports that NCCL would use."""
    interfaces = rdma_ports.roce_interfaces(machine, expected)
    sizes = {
        name: leading_number(machine.read(f"/sys/class/net/{name}/mtu") or "") or 0.0 for name in sorted(interfaces)
    }
    majority_mtu = most_common(sizes.values()) or 0.0
    other = check_values(SAME, sizes, lambda size: size != majority_mtu, threshold=f"{majority_mtu:g}")
    common = {name: size for name, size in sizes.items() if size == majority_mtu}
    return [*check_values(LARGE, common, lambda size: size < MIN_MTU), *other]

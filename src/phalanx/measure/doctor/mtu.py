"""Sizes of packets: those of RDMA fit into Ethernet's."""

from __future__ import annotations

from phalanx.measure.doctor import ports
from phalanx.measure.doctor.expected import Expected
from phalanx.measure.doctor.finding import Finding, Rule, judge, usual
from phalanx.measure.doctor.machine import Machine
from phalanx.measure.doctor.smi import number

LEAST = 4200
"""RDMA's 4096 bytes and its headers; Ethernet's usual 1500 leave packets of 1024."""
LARGE = Rule(
    "mtu.large", "MTU of the interfaces of RoCE ports", "WARN", f"at least {LEAST}", "bytes",
    "NVIDIA, RoCE (RDMA MTU 4096 needs 4200)", "set the MTU of {device} to 9000, on its switch port too",
    "ip link set {device} mtu 9000",
)  # fmt: skip
SAME = Rule(
    "mtu.same", "MTU of the interfaces of RoCE ports", "FAIL", "the same as the others'", "bytes",
    "Primus (MTU drift against the majority)", "set the MTU of {device} to that of the others",
    "ip link set {device} mtu 9000",
)  # fmt: skip
RULES = (LARGE, SAME)


def check(machine: Machine, expected: Expected) -> list[Finding]:
    """The interfaces of RoCE ports that NCCL would use."""
    over = ports.over_ethernet(machine, expected)
    sizes = {name: number(machine.read(f"/sys/class/net/{name}/mtu") or "") or 0.0 for name in sorted(over)}
    most = usual(sizes.values()) or 0.0
    other = judge(SAME, sizes, lambda size: size != most, f"{most:g}")
    common = {name: size for name, size in sizes.items() if size == most}
    return [*judge(LARGE, common, lambda size: size < LEAST), *other]

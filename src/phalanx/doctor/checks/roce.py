"""Lossless RoCE: consistent settings of DSCP, PFC, ECN and NCCL_IB_TC.

A packet's DSCP determines its priority. PFC must not drop that priority, ECN must mark it, and NCCL_IB_TC must be 4 x
that DSCP. Each setting is in another place; this check compares them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from phalanx.doctor.checks import rdma_ports
from phalanx.doctor.expectations import Expectations
from phalanx.doctor.finding import CheckRule, CheckSkipped, DoctorFinding, check_values
from phalanx.doctor.machine import Machine

TC_VARIABLE = "NCCL_IB_TC"
READABLE = CheckRule(
    id="roce.readable",
    quantity="output of mlnx_qos for each interface",
    severity="WARN",
    threshold="trust, mapping and PFC",
    unit="",
    source="mlnx_qos (MLNX_OFED)",
    remedy="run it as root: without it, the settings of {device} are unknown",
    command="mlnx_qos -i {device}",
)
TRUST = CheckRule(
    id="roce.trust",
    quantity="field that determines a packet's priority",
    severity="FAIL",
    threshold="dscp",
    unit="",
    source="NVIDIA, RoCE configuration (trust state)",
    remedy="trust DSCP: RoCE v2 carries no VLAN priority over routers",
    command="mlnx_qos -i {device} --trust dscp",
)
PFC = CheckRule(
    id="roce.pfc",
    quantity="priorities that PFC makes lossless",
    severity="FAIL",
    threshold="one",
    unit="",
    source="NVIDIA, RoCE configuration (priority 3 by default)",
    remedy="enable PFC for one priority, on the switches too; every further one takes buffers from it",
    command="mlnx_qos -i {device} --pfc 0,0,0,1,0,0,0,0",
)
CLASS = CheckRule(
    id="roce.traffic_class",
    quantity=f"priority of NCCL's packets ({TC_VARIABLE} = 4 x DSCP, and the DSCP's priority)",
    severity="FAIL",
    threshold="one that PFC makes lossless",
    unit="",
    source="NVIDIA, RoCE configuration; Primus sets the variable so",
    remedy=f"set {TC_VARIABLE} to 4 x a DSCP of the lossless priority (106 is DSCP 26, priority 3, and ECN-capable)",
    command="mlnx_qos -i {device}; export NCCL_IB_TC=106",
)
ECN = CheckRule(
    id="roce.ecn",
    quantity="ECN for that priority, at the notification point and at the reaction point",
    severity="FAIL",
    threshold="1, 1",
    unit="",
    source="NVIDIA, DCQCN (roce_np and roce_rp)",
    remedy="enable ECN for the lossless priority, on the switches too",
    command="echo 1 > /sys/class/net/{device}/ecn/roce_np/enable/3; echo 1 > "
    "/sys/class/net/{device}/ecn/roce_rp/enable/3",
)
CNP = CheckRule(
    id="roce.cnp",
    quantity="priority of congestion notifications",
    severity="WARN",
    threshold="not the lossless one",
    unit="",
    source="NVIDIA, DCQCN (CNP priority 6 by default)",
    remedy="give CNPs a priority of their own: if paused, they arrive too late",
    command="echo 6 > /sys/class/net/{device}/ecn/roce_np/cnp_802p_prio",
)
RULES = (READABLE, TRUST, PFC, CLASS, ECN, CNP)
PRIORITY_PATTERN = re.compile(r"prio:\s*(\d+) dscp:([\d,]+)")
PFC_PATTERN = re.compile(r"PFC configuration:\s+priority[\s\d]*?\n\s*enabled((?:\s+[01]){8})")
GLOBAL_CLASS_PATTERN = re.compile(r"tclass=(\d+)")


@dataclass(frozen=True)
class QosConfig:
    """QoS settings of an interface, as mlnx_qos prints them."""

    trust: str
    priority: dict[int, int]
    """The priority of each DSCP."""
    lossless: tuple[int, ...]


def parse_mlnx_qos(text: str) -> QosConfig | None:
    """Parse the output of mlnx_qos -i, or return None if it is incomplete."""
    trust = re.search(r"Priority trust state: (\w+)", text)
    enabled = PFC_PATTERN.search(text)
    if not trust or not enabled:
        return None
    priority = {int(dscp): int(prio) for prio, row in PRIORITY_PATTERN.findall(text) for dscp in row.split(",") if dscp}
    return QosConfig(trust[1], priority, tuple(i for i, flag in enumerate(enabled[1].split()) if flag == "1"))


def check(machine: Machine, expected: Expectations) -> list[DoctorFinding]:
    """Check the interfaces of RoCE ports that NCCL would use."""
    interfaces = rdma_ports.roce_interfaces(machine, expected)
    configs = {name: _query_qos(machine, name) for name in interfaces}
    if not any(config is not None for config in configs.values()):
        raise CheckSkipped("no mlnx_qos: PFC, trust and DSCP are unknown")
    unclear = [READABLE.violation(name, "unknown output format") for name, config in configs.items() if config is None]
    clear = {name: config for name, config in configs.items() if config is not None}
    usable = {name: config for name, config in clear.items() if config.trust == "dscp" and len(config.lossless) == 1}
    classes = {name: _traffic_class(machine, interfaces[name], config) for name, config in usable.items()}
    lossless = {name: config.lossless[0] for name, config in usable.items()}
    return [
        *(unclear or [READABLE.ok("trust, mapping and PFC")]),
        *check_values(TRUST, {name: config.trust for name, config in clear.items()}, lambda trust: trust != "dscp"),
        *check_values(
            PFC,
            {name: ", ".join(map(str, config.lossless)) or "none" for name, config in clear.items()},
            _is_not_single,
        ),
        *_check_classes(classes, lossless),
        *check_values(ECN, _ecn_flags(machine, lossless), lambda flags: flags != "1, 1"),
        *_check_cnp(machine, lossless),
    ]


def _query_qos(machine: Machine, interface: str) -> QosConfig | None:
    output = machine.run(f"mlnx_qos_{interface}", "mlnx_qos", "-i", interface)
    return parse_mlnx_qos(output.text) if output else None


def _is_not_single(listed: str) -> bool:
    return not listed.isdecimal()


def _traffic_class(machine: Machine, port: rdma_ports.Port, config: QosConfig) -> tuple[int, int]:
    """Return DSCP and priority of NCCL's packets on a port.

    They follow from the card's global traffic class, which overrides all others, else from NCCL_IB_TC, by default 0.
    """
    global_class = GLOBAL_CLASS_PATTERN.search(
        machine.read(f"{rdma_ports.ROOT}/{port.device}/tc/{port.number}/traffic_class") or ""
    )
    traffic_class = machine.environment.get(TC_VARIABLE, "0")
    dscp = int(global_class[1] if global_class else traffic_class if traffic_class.isdecimal() else 0) // 4
    return dscp, config.priority.get(dscp, 0)


def _check_classes(classes: dict[str, tuple[int, int]], lossless: dict[str, int]) -> list[DoctorFinding]:
    descriptions = {name: f"DSCP {dscp}, priority {priority}" for name, (dscp, priority) in classes.items()}
    wrong = [name for name, (_, priority) in classes.items() if priority != lossless[name]]
    broken = [CLASS.violation(name, descriptions[name], f"priority {lossless[name]}") for name in wrong]
    return broken or check_values(CLASS, descriptions, lambda _: False)


def _ecn_flags(machine: Machine, lossless: dict[str, int]) -> dict[str, str]:
    """Return the ECN flags of the lossless priority, if the driver shows them (MLNX_OFED's does)."""
    flags_by_interface = {}
    for name, priority in lossless.items():
        flags = [machine.read(f"/sys/class/net/{name}/ecn/{role}/enable/{priority}") for role in ("roce_np", "roce_rp")]
        if all(flags):
            flags_by_interface[name] = ", ".join(str(flag) for flag in flags)
    return flags_by_interface


def _check_cnp(machine: Machine, lossless: dict[str, int]) -> list[DoctorFinding]:
    priorities = {name: machine.read(f"/sys/class/net/{name}/ecn/roce_np/cnp_802p_prio") for name in lossless}
    cnp_priorities = {name: int(priority) for name, priority in priorities.items() if priority and priority.isdecimal()}
    wrong = [CNP.violation(name, priority) for name, priority in cnp_priorities.items() if priority == lossless[name]]
    return wrong or check_values(CNP, cnp_priorities, lambda _: False)

"""Links to other nodes: RDMA ports, RoCE settings, and the interface that sockets use."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from phalanx.doctor.checks.nccl import named_interfaces
from phalanx.doctor.expectations import Expectations
from phalanx.doctor.finding import CheckSkipped, DoctorFinding, most_common
from phalanx.doctor.machine import Machine
from phalanx.doctor.probes import rdma
from phalanx.doctor.probes.text import leading_number
from phalanx.doctor.rules import RULES

DAY_SECONDS = 86400
ROCE_V2 = "RoCE v2"
LINK_LOCAL_ROCE_V2 = "link-local RoCE v2"
LINK_LOCAL_PREFIX = "fe80:0000:0000:0000:"
"""Prefix of the GID that every active port has.

No router forwards it, and NCCL never selects one by itself (validGid in its transport/net_ib.cc).
"""
INDEX_VARIABLE = "NCCL_IB_GID_INDEX"
TC_VARIABLE = "NCCL_IB_TC"
PRIORITY_PATTERN = re.compile(r"prio:\s*(\d+) dscp:([\d,]+)")
PFC_PATTERN = re.compile(r"PFC configuration:\s+priority[\s\d]*?\n\s*enabled((?:\s+[01]){8})")
GLOBAL_CLASS_PATTERN = re.compile(r"tclass=(\d+)")


def check_rdma_ports(machine: Machine, expected: Expectations) -> Iterator[DoctorFinding]:
    """Check state and speed of the ports that the run would use, and report the others as skipped."""
    ports = rdma.selected_ports(machine, expected)
    excluded = [name for name in rdma.rdma_ports(machine) if name not in ports]
    if excluded:
        named = machine.environment.get("NCCL_IB_HCA")
        reason = "not named by NCCL_IB_HCA" if named else "slower than other kinds of card"
        yield RULES["rdma.state"].skip(f"{', '.join(excluded)}: {reason}")
    states = {
        name: ", ".join(machine.read(f"{port.path}/{state}") or "unknown" for state in ("state", "phys_state"))
        for name, port in ports.items()
    }
    yield from RULES["rdma.state"].check(states)
    rates = {name: rdma.rate_gbps(machine, port) for name, port in ports.items() if states[name].startswith("4:")}
    required_gbps = 8e-9 * _node_bytes_per_second(expected) / max(1, len(ports))
    yield from RULES["rdma.rate"].check(rates, limit=max(required_gbps, most_common(rates.values()) or 0.0))
    days = max(1.0, (leading_number(machine.read("/proc/uptime")) or 0) / DAY_SECONDS)
    link_downs = {
        name: leading_number(machine.read(f"{port.path}/counters/link_downed")) for name, port in ports.items()
    }
    flaps_per_day = {name: round(count / days, 1) for name, count in link_downs.items() if count is not None}
    yield from RULES["rdma.flaps"].check(flaps_per_day)
    firmware = {port.device: machine.read(f"{rdma.ROOT}/{port.device}/fw_ver") for port in ports.values()}
    versions = {device: version for device, version in firmware.items() if version}
    card_kinds = {port.device: rdma.card_kind(machine, port) for port in ports.values()}
    usual_versions = {
        card_kind: most_common(versions[card] for card in versions if card_kinds[card] == card_kind)
        for card_kind in card_kinds.values()
    }
    yield from RULES["rdma.firmware"].check(
        versions, limit={device: usual_versions[card_kinds[device]] for device in versions}
    )


def _node_bytes_per_second(expected: Expectations) -> float:
    """Return the network speed of all ranks of a node, or 0 if the run does not specify it."""
    return (expected.network_bytes_per_second or 0) * (expected.ranks or 0)


def check_roce_gid(machine: Machine, expected: Expectations) -> Iterator[DoctorFinding]:
    """Check the GIDs (RDMA's addresses over Ethernet) of the active ports that NCCL would use."""
    ports = {
        name: port
        for name, port in rdma.selected_ports(machine, expected).items()
        if port.roce and (machine.read(f"{port.path}/state") or "").startswith("4:")
    }
    if not ports:
        raise CheckSkipped("no RoCE port is up")
    index = machine.environment.get(INDEX_VARIABLE, "-1")
    gid_types: dict[str, dict[str, str]] = {name: {} for name in ports}
    for name, port in ports.items():
        for path in machine.glob(f"{port.path}/gids/*"):
            gid = machine.read(path) or ""
            if gid.replace(":", "").strip("0"):
                gid_index = path.rpartition("/")[2]
                gid_type = machine.read(f"{port.path}/gid_attrs/types/{gid_index}") or "unknown"
                is_link_local = gid_type == ROCE_V2 and gid.startswith(LINK_LOCAL_PREFIX)
                gid_types[name][gid_index] = LINK_LOCAL_ROCE_V2 if is_link_local else gid_type
    # On a flat network, the user may name a link-local GID.
    accepted = (ROCE_V2,) if index == "-1" else (ROCE_V2, LINK_LOCAL_ROCE_V2)
    counts = {
        name: sum(gid_type in accepted for gid_type in gid_kinds.values()) for name, gid_kinds in gid_types.items()
    }
    yield from RULES["roce.gid"].check(counts)
    if index == "-1":
        yield RULES["roce.gid_index"].skip(f"{INDEX_VARIABLE} is not set")
    else:
        yield from RULES["roce.gid_index"].check({name: gids.get(index, "none") for name, gids in gid_types.items()})


def check_mtu(machine: Machine, expected: Expectations) -> Iterator[DoctorFinding]:
    """Check that an RDMA packet fits into an Ethernet packet of the interfaces of RoCE ports that NCCL would use."""
    interfaces = sorted(rdma.roce_interfaces(machine, expected))
    sizes = {name: leading_number(machine.read(f"/sys/class/net/{name}/mtu")) or 0.0 for name in interfaces}
    majority = most_common(sizes.values())
    yield from RULES["mtu.large"].check({name: size for name, size in sizes.items() if size == majority})
    yield from RULES["mtu.same"].check(sizes, limit=majority)


@dataclass(frozen=True)
class QosConfig:
    """QoS settings of an interface, as mlnx_qos prints them."""

    trust: str
    priority: dict[int, int]
    """The priority of each DSCP."""
    lossless: tuple[int, ...]


def _parse_qos(text: str) -> QosConfig | None:
    """Return what mlnx_qos says of an interface, or None if its output has another format."""
    trust = re.search(r"Priority trust state: (\w+)", text)
    enabled = PFC_PATTERN.search(text)
    if not trust or not enabled:
        return None
    priority = {int(dscp): int(prio) for prio, row in PRIORITY_PATTERN.findall(text) for dscp in row.split(",") if dscp}
    return QosConfig(trust[1], priority, tuple(i for i, flag in enumerate(enabled[1].split()) if flag == "1"))


def check_roce(machine: Machine, expected: Expectations) -> Iterator[DoctorFinding]:
    """Check that DSCP, PFC, ECN and NCCL_IB_TC make the packets of NCCL lossless.

    A packet's DSCP determines its priority. PFC must not drop that priority, ECN must mark it, and NCCL_IB_TC must be
    4 x that DSCP. Each setting is in another place; this check compares them.
    """
    interfaces = rdma.roce_interfaces(machine, expected)
    outputs = {name: machine.run(f"mlnx_qos_{name}", "mlnx_qos", "-i", name) for name in interfaces}
    if not any(outputs.values()):
        raise CheckSkipped("no mlnx_qos: PFC, trust and DSCP are unknown")
    parsed = {name: _parse_qos(output.text if output else "") for name, output in outputs.items()}
    configs = {name: config for name, config in parsed.items() if config is not None}
    unclear = [(name, "unknown output format") for name in outputs if name not in configs]
    yield from RULES["roce.readable"].report(unclear, ok="trust, mapping and PFC")
    if not configs:
        return
    yield from RULES["roce.trust"].check({name: config.trust for name, config in configs.items()})
    yield from RULES["roce.pfc"].check(
        {name: ", ".join(map(str, config.lossless)) or "none" for name, config in configs.items()}
    )
    usable = {name: config for name, config in configs.items() if config.trust == "dscp" and len(config.lossless) == 1}
    lossless = {name: config.lossless[0] for name, config in usable.items()}
    yield from _check_traffic_class(machine, interfaces, usable)
    # MLNX_OFED's driver shows the ECN flags of a priority.
    ecn = {
        name: [machine.read(f"/sys/class/net/{name}/ecn/{role}/enable/{priority}") for role in ("roce_np", "roce_rp")]
        for name, priority in lossless.items()
    }
    yield from RULES["roce.ecn"].check({name: ", ".join(map(str, flags)) for name, flags in ecn.items() if all(flags)})
    cnp = {name: machine.read(f"/sys/class/net/{name}/ecn/roce_np/cnp_802p_prio") or "" for name in lossless}
    yield from RULES["roce.cnp"].check(
        {name: int(priority) for name, priority in cnp.items() if priority.isdecimal()}, limit=lossless
    )


def _check_traffic_class(
    machine: Machine, interfaces: dict[str, rdma.Port], configs: dict[str, QosConfig]
) -> list[DoctorFinding]:
    """Check the priority of NCCL's packets on each port.

    It follows from the card's global traffic class, which overrides all others, else from NCCL_IB_TC, by default 0.
    """
    rule = RULES["roce.traffic_class"]
    descriptions = {}
    violations = []
    for name, config in configs.items():
        port = interfaces[name]
        global_class = GLOBAL_CLASS_PATTERN.search(
            machine.read(f"{rdma.ROOT}/{port.device}/tc/{port.number}/traffic_class") or ""
        )
        traffic_class = machine.environment.get(TC_VARIABLE, "0")
        dscp = int(global_class[1] if global_class else traffic_class if traffic_class.isdecimal() else 0) // 4
        priority = config.priority.get(dscp, 0)
        descriptions[name] = f"DSCP {dscp}, priority {priority}"
        if priority not in config.lossless:
            violations.append(rule.violation(name, descriptions[name], f"priority {config.lossless[0]}"))
    return violations or [rule.ok_range(descriptions.values())]


def check_socket_network(machine: Machine, expected: Expectations) -> Iterator[DoctorFinding]:
    """Check the interfaces that NCCL or gloo variables select, else that of the default route.

    The variables are NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME. Virtual machines and radio links report no speed.
    """
    if expected.nodes == 1:
        raise CheckSkipped("the run has one node")
    names = named_interfaces(machine)
    if not names:
        # The destination of the default route in /proc/net/route is all zeros.
        rows = [line.split() for line in (machine.read("/proc/net/route") or "").splitlines()]
        names = [row[0] for row in rows if row[1:2] == ["00000000"]][:1]
    if not names:
        raise CheckSkipped("no variable names an interface, and no default route exists")
    all_speeds = {name: leading_number(machine.read(f"/sys/class/net/{name}/speed")) or 0.0 for name in names}
    speeds = {name: speed for name, speed in all_speeds.items() if speed > 0}
    uses_rdma = rdma.rdma_devices(machine) and expected.gpus != 0
    required_mbps = 0.0 if uses_rdma else 8e-6 * _node_bytes_per_second(expected)
    yield from RULES["network.speed"].check(speeds, limit=max(RULES["network.speed"].limit, required_mbps))
    duplex = {name: machine.read(f"/sys/class/net/{name}/duplex") or "" for name in speeds}
    yield from RULES["network.duplex"].check(duplex)

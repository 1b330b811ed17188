"""NCCL: its variables and gloo's, checked against the existing interfaces and cards, and its log."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path

from phalanx.doctor.expectations import Expectations
from phalanx.doctor.finding import CheckSkipped, DoctorFinding, most_common
from phalanx.doctor.machine import Machine
from phalanx.doctor.probes import rdma
from phalanx.doctor.rules import RULES, skip_rules

NCCL_VARIABLE = "NCCL_SOCKET_IFNAME"
GLOO_VARIABLE = "GLOO_SOCKET_IFNAME"
LOCAL_PREFIXES = RULES["nccl.interface_local"].inputs
"""Prefixes of interfaces that no other node can reach."""
LINE_PATTERN = re.compile(r"^(?:.*?[\s:])??([\w.-]+):\d+:\d+ \[\d+\] (?:\S+:\d+ )?NCCL (INFO|WARN) (.*)$")
"""Format of a line of the log: host:pid:tid [device] NCCL INFO ... (NCCL's src/debug.cc).

Warnings also have their source line. Launchers write a prefix: "0: " (srun), "[default0]:" (torchrun), "[1,0]<stdout>:"
(mpirun).
"""
VERSION_PATTERN = re.compile(r"(?:^|[\s:\]>])NCCL version (\S+)")
TIMESTAMP_PREFIX = re.compile(r"^\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)?\]\s*")


def check_variables(machine: Machine, expected: Expectations) -> Iterator[DoctorFinding]:
    """Check the variables that are set."""
    if not any(name.startswith(("NCCL_", "GLOO_")) for name in machine.environment):
        raise CheckSkipped("no variable of NCCL or gloo is set")
    selected = _select_interfaces(machine)
    yield from _check_interfaces(machine, selected, is_single_node=expected.nodes == 1)
    external = [name for name in selected.get(NCCL_VARIABLE, []) if not name.startswith(LOCAL_PREFIXES)]
    yield _check_master_route(machine, external)
    yield from _check_hca_names(machine)
    rule = RULES["nccl.left_over"]
    forced = ((name, machine.environment.get(name, "")) for name in rule.inputs)
    set_variables = (
        (name, value) for name, value in forced if (value == "0" if name.endswith("ENABLE") else value not in ("", "0"))
    )
    yield from rule.report(set_variables, ok="none")


def named_interfaces(machine: Machine) -> list[str]:
    """Return the interfaces that the variables select and that other nodes can reach."""
    selected = {name for names in _select_interfaces(machine).values() for name in names}
    return [name for name in _list_interfaces(machine) if name in selected and not name.startswith(LOCAL_PREFIXES)]


def _select_interfaces(machine: Machine) -> dict[str, list[str]]:
    """Return the existing interfaces that each variable selects, for the variables that are set."""
    interfaces = _list_interfaces(machine)
    selected = {}
    if nccl_value := machine.environment.get(NCCL_VARIABLE):
        selected[NCCL_VARIABLE] = [name for name in interfaces if matches_interface_filter(nccl_value, name)]
    if gloo_value := machine.environment.get(GLOO_VARIABLE):
        selected[GLOO_VARIABLE] = [name for name in interfaces if name in gloo_value.split(",")]
    return selected


def _list_interfaces(machine: Machine) -> list[str]:
    """Return all interfaces, without the file bonding_masters next to them."""
    return [path.split("/")[4] for path in machine.glob("/sys/class/net/*/operstate")]


def _check_interfaces(
    machine: Machine, selected: dict[str, list[str]], is_single_node: bool
) -> Iterator[DoctorFinding]:
    """Check that the selected interfaces exist, that other nodes can reach them, and that one is up."""
    exists = RULES["nccl.interface"]
    gloo_exists = RULES["nccl.gloo_interface"]
    if not selected:
        ids = ("nccl.interface", "nccl.gloo_interface", "nccl.interface_local", "nccl.interface_up")
        yield from skip_rules("no variable names an interface", *ids)
        return
    operstates = {name: machine.read(f"/sys/class/net/{name}/operstate") for name in _list_interfaces(machine)}
    # Virtual interfaces have the state "unknown", which counts as up.
    states = {name: "up" if state in (None, "", "unknown") else str(state) for name, state in operstates.items()}
    available = f"of {', '.join(states)}"
    if NCCL_VARIABLE not in selected:
        yield exists.skip(f"{NCCL_VARIABLE} is not set")
    elif selected[NCCL_VARIABLE]:
        yield exists.ok(selected[NCCL_VARIABLE][0])
    else:
        yield exists.violation(NCCL_VARIABLE, machine.environment[NCCL_VARIABLE], f"one {available}")
    names = [name for name in machine.environment.get(GLOO_VARIABLE, "").split(",") if name]
    unknown = [name for name in names if name not in states]
    if unknown:
        yield from (gloo_exists.violation(GLOO_VARIABLE, name, f"some {available}") for name in unknown)
    elif selected.get(GLOO_VARIABLE):
        yield gloo_exists.ok(selected[GLOO_VARIABLE][0])
    else:
        yield gloo_exists.skip(f"{GLOO_VARIABLE} is not set")

    def local_interfaces(names: list[str]) -> str:
        """Return the interfaces that no other node can reach, if NCCL would use them: up, or without others."""
        local = [name for name in names if name.startswith(LOCAL_PREFIXES)]
        return ", ".join(local if len(local) == len(names) else [name for name in local if states[name] == "up"])

    local = {variable: local_interfaces(names) for variable, names in selected.items() if names}
    if is_single_node:
        yield RULES["nccl.interface_local"].skip("the run has one node")
    else:
        yield from RULES["nccl.interface_local"].check(local)
    others = [variable for variable, listed in local.items() if not listed]
    yield from RULES["nccl.interface_up"].check(
        {variable: " ".join(states[name] for name in selected[variable]) for variable in others}
    )


def matches_interface_filter(value: str, interface: str) -> bool:
    """Return whether a list in the format of NCCL_SOCKET_IFNAME selects an interface.

    The list contains prefixes of names; after = exact names; after ^ the names that are excluded.
    """
    names = [name for name in value.lstrip("^=").split(",") if name]
    exact = "=" in value[:2]
    matches = any(interface == name if exact else interface.startswith(name) for name in names)
    return matches != value.startswith("^")


def _check_master_route(machine: Machine, allowed: list[str]) -> DoctorFinding:
    rule = RULES["nccl.route"]
    master = machine.environment.get("MASTER_ADDR")
    if not master or not allowed:
        return rule.skip("MASTER_ADDR and NCCL_SOCKET_IFNAME are not both set to usable values")
    # `ip` accepts no names, so the system's first address of a name is used.
    address: str | None = None
    with suppress(ValueError):
        address = str(ip_address(master))
    if address is None:
        resolved = machine.run("master", "getent", "ahosts", master)
        address = next(iter(resolved.text.split()), None) if resolved and not resolved.code else None
    output = machine.run("route", "ip", "route", "get", address) if address else None
    if output is None:
        return rule.skip(f"{master} has no known address, or `ip` is not installed")
    fields = output.text.split()
    device = fields[fields.index("dev") + 1] if "dev" in fields[:-1] else None
    if device is None or device == "lo":
        return rule.skip(f"no route to {master} over a network")
    return rule.ok(device) if device in allowed else rule.violation(device, device, f"one of {', '.join(allowed)}")


def _check_hca_names(machine: Machine) -> list[DoctorFinding]:
    rule = RULES["nccl.hca"]
    hca_filter = machine.environment.get("NCCL_IB_HCA", "")
    if not hca_filter:
        return [rule.skip("NCCL_IB_HCA is not set")]
    if hca_filter.startswith("^"):  # excluding an absent device is harmless
        return [rule.ok(hca_filter)]
    ports = rdma.rdma_ports(machine)
    prefix = "=" if "=" in hca_filter[:2] else ""
    names = [name for name in hca_filter.lstrip("=").split(",") if name]
    missing = [
        name for name in names if not any(rdma.matches_hca_filter(prefix + name, port) for port in ports.values())
    ]
    existing = f"some of {', '.join(ports) or 'none'}"
    return [rule.violation(name, "missing", existing) for name in missing] or [rule.ok(hca_filter)]


def check_log(machine: Machine, expected: Expectations) -> Iterator[DoctorFinding]:
    """Check a log of NCCL_DEBUG=INFO: the given one, or the one that NCCL_DEBUG_FILE names without a pattern."""
    path = expected.nccl_log or machine.environment.get("NCCL_DEBUG_FILE", "")
    if not path:
        raise CheckSkipped("no log: give --nccl-log FILE, of a run with NCCL_DEBUG=INFO")
    text = machine.read(path if machine.root else str(Path(path).absolute()))
    if text is None:
        raise CheckSkipped(f"{path} cannot be read")
    log_lines = [TIMESTAMP_PREFIX.sub("", line) for line in text.splitlines()]
    lines = [match.groups() for match in map(LINE_PATTERN.match, log_lines) if match]
    if not lines:
        raise CheckSkipped("no line of NCCL in the log")
    yield from _check_socket_fallback(lines, has_rdma=bool(rdma.rdma_devices(machine)))
    rdma_channels = [message for _, _, message in lines if "via NET/" in message and "/Socket" not in message]
    if rdma_channels:
        yield from RULES["nccl.gdr"].check(sum("GDRDMA" not in message for message in rdma_channels))
    else:
        yield RULES["nccl.gdr"].skip("no channel over RDMA")
    warnings = {host: message for host, level, message in lines if level == "WARN"}
    rule = RULES["nccl.warnings"]
    yield from [rule.violation(host, message, host=host) for host, message in warnings.items()] or [rule.ok("none")]
    yield from _check_nccl_versions(log_lines)


def _check_socket_fallback(lines: Sequence[tuple[str, ...]], has_rdma: bool) -> list[DoctorFinding]:
    """Return the hosts that selected sockets, if RDMA devices exist or others selected another network."""
    rule = RULES["nccl.fallback"]
    choices = [(host, message.rpartition(" ")[2]) for host, _, message in lines if message.startswith("Using network ")]
    networks = {network for _, network in choices}
    hosts = dict.fromkeys(host for host, network in choices if network == "Socket")
    if hosts and (has_rdma or len(networks) > 1):
        no_card = any("NET/IB : No device found" in message for _, _, message in lines)
        measured = "Socket" + (" (NET/IB : No device found)" if no_card else "")
        return [rule.violation(host, measured, host=host) for host in hosts]
    return [rule.ok(", ".join(sorted(networks)) or "unknown")]


def _check_nccl_versions(lines: Sequence[str]) -> list[DoctorFinding]:
    """Return the versions that differ from that of most lines; lines of NCCL up to 2.2x name no host."""
    rule = RULES["nccl.version"]
    versions = []
    for line in lines:
        if version_match := VERSION_PATTERN.search(line):
            line_match = LINE_PATTERN.match(line)
            versions.append((line_match[1] if line_match else "", version_match[1]))
    majority = most_common(version for _, version in versions) or ""
    deviating = [(host, version) for host, version in sorted(set(versions)) if version != majority]
    violations = [rule.violation(host, version, majority, host=host) for host, version in deviating]
    return violations or [rule.ok_range(dict(versions).values())]

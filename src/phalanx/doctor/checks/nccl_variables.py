"""Variables of NCCL and gloo, checked against the existing interfaces and cards."""

from __future__ import annotations

from contextlib import suppress
from ipaddress import ip_address

from phalanx.doctor.checks import rdma_ports
from phalanx.doctor.expectations import Expectations
from phalanx.doctor.finding import CheckRule, CheckSkipped, DoctorFinding, check_values
from phalanx.doctor.machine import Machine

INTERFACE_VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
LOCAL_PREFIXES = ("lo", "docker", "veth", "virbr")
"""Prefixes of interfaces that no other node can reach."""
GLOO_VARIABLE = INTERFACE_VARIABLES[1]
LEFTOVER_VARIABLES = (
    "NCCL_P2P_DISABLE",
    "NCCL_SHM_DISABLE",
    "NCCL_IB_DISABLE",
    "NCCL_NVLS_ENABLE",
    "NCCL_ALGO",
    "NCCL_PROTO",
)
EXISTS = CheckRule(
    id="nccl.interface",
    quantity="interfaces that NCCL_SOCKET_IFNAME selects",
    severity="FAIL",
    threshold="at least one that exists",
    unit="",
    source="NCCL (NCCL_SOCKET_IFNAME); Primus",
    remedy="name an interface of this node in {device}, or unset it",
    command="ip -br link; env | grep SOCKET_IFNAME",
)
GLOO_EXISTS = CheckRule(
    id="nccl.gloo_interface",
    quantity="interfaces that GLOO_SOCKET_IFNAME names",
    severity="FAIL",
    threshold="all exist",
    unit="",
    source="gloo (transport/tcp/device.cc): full names; gloo supports neither ^ nor =, and fails if one is missing",
    remedy="list full interface names of this node in {device}, separated by commas, or unset it",
    command="ip -br link",
)
REACHED = CheckRule(
    id="nccl.interface_local",
    quantity="selected interfaces that no other node can reach",
    severity="FAIL",
    threshold="none (lo, docker, veth, virbr)",
    unit="",
    source="NCCL (its default uses lo and docker last)",
    remedy="name the interface in {device} that other nodes can reach",
    command="ip -br addr",
)
UP = CheckRule(
    id="nccl.interface_up",
    quantity="state of the selected interfaces",
    severity="FAIL",
    threshold="one is up",
    unit="",
    source="Linux (operstate)",
    remedy="bring the interface up, or name another in {device}",
    command="ip -br link",
)
ROUTE = CheckRule(
    id="nccl.route",
    quantity="interface of the route to MASTER_ADDR",
    severity="WARN",
    threshold="one that NCCL_SOCKET_IFNAME selects",
    unit="",
    source="PyTorch and NCCL first rendezvous at MASTER_ADDR",
    remedy="let both use one network: NCCL_SOCKET_IFNAME, or another MASTER_ADDR",
    command="ip route get $MASTER_ADDR",
)
CARDS = CheckRule(
    id="nccl.hca",
    quantity="RDMA devices that NCCL_IB_HCA names",
    severity="FAIL",
    threshold="exist",
    unit="",
    source="NCCL (NCCL_IB_HCA)",
    remedy="name devices of this node in NCCL_IB_HCA, or unset it: NCCL falls back to sockets",
    command="ls /sys/class/infiniband; echo $NCCL_IB_HCA",
)
FORCED = CheckRule(
    id="nccl.left_over",
    quantity="variables that disable transports or algorithms",
    severity="WARN",
    threshold="not set",
    unit="",
    source="NCCL, environment variables (meant for debugging)",
    remedy="unset {device}: it costs bandwidth",
    command="unset {device}",
)
RULES = (EXISTS, GLOO_EXISTS, REACHED, UP, ROUTE, CARDS, FORCED)


def check(machine: Machine, expected: Expectations) -> list[DoctorFinding]:
    """Check the variables that are set."""
    if not any(name.startswith(("NCCL_", "GLOO_")) for name in machine.environment):
        raise CheckSkipped("no variable of NCCL or gloo is set")
    interfaces = _list_interfaces(machine)
    values = {name: machine.environment[name] for name in INTERFACE_VARIABLES if machine.environment.get(name)}
    selected = {
        name: [interface for interface in interfaces if _selects_interface(name, value, interface)]
        for name, value in values.items()
    }
    leftover = {name: machine.environment[name] for name in LEFTOVER_VARIABLES if _is_forced(machine, name)}
    return [
        *_check_interfaces(machine, values, selected, interfaces=interfaces, is_single_node=expected.nodes == 1),
        _check_route(
            machine, [name for name in selected.get(INTERFACE_VARIABLES[0], []) if not name.startswith(LOCAL_PREFIXES)]
        ),
        *_check_cards(machine),
        *([FORCED.violation(name, value) for name, value in leftover.items()] or [FORCED.ok("none")]),
    ]


def named_interfaces(machine: Machine) -> list[str]:
    """Return the interfaces that the variables select and that other nodes can reach."""
    values = {name: machine.environment[name] for name in INTERFACE_VARIABLES if machine.environment.get(name)}
    external = [interface for interface in _list_interfaces(machine) if not interface.startswith(LOCAL_PREFIXES)]
    return [
        interface
        for interface in external
        if any(_selects_interface(name, value, interface) for name, value in values.items())
    ]


def _selects_interface(variable: str, value: str, interface: str) -> bool:
    return interface in _split_names(value) if variable == GLOO_VARIABLE else matches_interface_filter(value, interface)


def _split_names(value: str) -> list[str]:
    return [name for name in value.split(",") if name]


def _list_interfaces(machine: Machine) -> list[str]:
    """Return all interfaces, without the file bonding_masters next to them."""
    return [path.split("/")[4] for path in machine.glob("/sys/class/net/*/operstate")]


def _check_interfaces(
    machine: Machine,
    values: dict[str, str],
    selected: dict[str, list[str]],
    interfaces: list[str],
    is_single_node: bool,
) -> list[DoctorFinding]:
    """Check that the selected interfaces exist, that other nodes can reach them, and that one is up."""
    if not values:
        return [rule.skip("no variable names an interface") for rule in (EXISTS, GLOO_EXISTS, REACHED, UP)]
    states = {name: _interface_state(machine, name) for name in interfaces}
    available = f"of {', '.join(interfaces)}"
    nccl_values = {name: value for name, value in values.items() if name != GLOO_VARIABLE}
    missing = [
        EXISTS.violation(name, value, f"one {available}") for name, value in nccl_values.items() if not selected[name]
    ]
    unknown = [
        GLOO_EXISTS.violation(GLOO_VARIABLE, name, f"some {available}")
        for name in _split_names(values.get(GLOO_VARIABLE, ""))
        if name not in interfaces
    ]
    local_interfaces = {name: _local_interfaces(names, states) for name, names in selected.items() if names}
    remote_states = {
        name: " ".join(states[interface] for interface in selected[name])
        for name, local in local_interfaces.items()
        if not local
    }
    return [
        *(missing or [_first_finding(EXISTS, INTERFACE_VARIABLES[0], selected)]),
        *(unknown or [_first_finding(GLOO_EXISTS, GLOO_VARIABLE, selected)]),
        *([REACHED.skip("the run has one node")] if is_single_node else check_values(REACHED, local_interfaces, bool)),
        *check_values(UP, remote_states, lambda operstates: "up" not in operstates.split()),
    ]


def _first_finding(rule: CheckRule, variable: str, selected: dict[str, list[str]]) -> DoctorFinding:
    interfaces = selected.get(variable)
    return rule.ok(interfaces[0]) if interfaces else rule.skip(f"{variable} is not set")


def _local_interfaces(names: list[str], states: dict[str, str]) -> str:
    """Return the selected interfaces that no other node can reach, if NCCL would use them.

    It uses them if they are up, or if it has no others.
    """
    local = [name for name in names if name.startswith(LOCAL_PREFIXES)]
    used = local if len(local) == len(names) else [name for name in local if states[name] == "up"]
    return ", ".join(used)


def matches_interface_filter(value: str, interface: str) -> bool:
    """Return whether a list in the format of NCCL_SOCKET_IFNAME selects an interface.

    The list contains prefixes of names; after = exact names; after ^ the names that are excluded.
    """
    names = [name for name in value.lstrip("^=").split(",") if name]
    exact = "=" in value[:2]
    matches = any(interface == name if exact else interface.startswith(name) for name in names)
    return matches != value.startswith("^")


def _interface_state(machine: Machine, interface: str) -> str:
    """Return the state of an interface; "unknown", which virtual interfaces have, counts as up."""
    state = machine.read(f"/sys/class/net/{interface}/operstate") or "unknown"
    return "up" if state == "unknown" else state


def _is_forced(machine: Machine, name: str) -> bool:
    value = machine.environment.get(name, "")
    return value == "0" if name.endswith("ENABLE") else value not in ("", "0")


def _check_route(machine: Machine, allowed: list[str]) -> DoctorFinding:
    master = machine.environment.get("MASTER_ADDR")
    if not master or not allowed:
        return ROUTE.skip("MASTER_ADDR and NCCL_SOCKET_IFNAME are not both set to usable values")
    address = _resolve_address(machine, master)
    output = machine.run("route", "ip", "route", "get", address) if address else None
    if output is None:
        return ROUTE.skip(f"{master} has no known address, or `ip` is not installed")
    fields = output.text.split()
    device = fields[fields.index("dev") + 1] if "dev" in fields[:-1] else None
    if device is None or device == "lo":
        return ROUTE.skip(f"no route to {master} over a network")
    return ROUTE.ok(device) if device in allowed else ROUTE.violation(device, device, f"one of {', '.join(allowed)}")


def _resolve_address(machine: Machine, name: str) -> str | None:
    """Return the first address that the system finds for a name, since `ip` accepts no names."""
    with suppress(ValueError):
        return str(ip_address(name))
    output = machine.run("master", "getent", "ahosts", name)
    return next(iter(output.text.split()), None) if output and not output.code else None


def _check_cards(machine: Machine) -> list[DoctorFinding]:
    hca_filter = machine.environment.get("NCCL_IB_HCA", "")
    ports = rdma_ports.rdma_ports(machine)
    if not hca_filter:
        return [CARDS.skip("NCCL_IB_HCA is not set")]
    if hca_filter.startswith("^"):  # excluding an absent device is harmless
        return [CARDS.ok(hca_filter)]
    prefix = "=" if "=" in hca_filter[:2] else ""
    names = [name for name in hca_filter.lstrip("=").split(",") if name]
    missing = [
        name for name in names if not any(rdma_ports.matches_hca_filter(prefix + name, port) for port in ports.values())
    ]
    if not ports:
        missing = names
    return [CARDS.violation(name, "missing", f"some of {', '.join(ports) or 'none'}") for name in missing] or [
        CARDS.ok(hca_filter)
    ]

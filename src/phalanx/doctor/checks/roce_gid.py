"""GIDs of RoCE ports: the addresses that RDMA uses over Ethernet."""

from __future__ import annotations

from phalanx.doctor.checks import rdma_ports
from phalanx.doctor.expectations import Expectations
from phalanx.doctor.finding import CheckRule, CheckSkipped, DoctorFinding, check_values
from phalanx.doctor.machine import Machine

ROCE_V2 = "RoCE v2"
LINK_LOCAL_ROCE_V2 = "link-local RoCE v2"
LINK_LOCAL_PREFIX = "fe80:0000:0000:0000:"
"""Prefix of the GID that every active port has.

No router forwards it, and NCCL never selects one by itself (validGid in its transport/net_ib.cc).
"""
INDEX_VARIABLE = "NCCL_IB_GID_INDEX"
ROUTABLE = CheckRule(
    id="roce.gid",
    quantity="RoCE v2 GIDs of each port, except link-local ones",
    severity="FAIL",
    threshold="at least 1",
    unit="GIDs",
    source="Primus (0 RoCE-v2 GIDs fail)",
    remedy="give the interface of {device} an IP address, and set the card's mode to RoCE v2",
    command="show_gids {device}; cma_roce_mode -d {device}",
)
CHOSEN = CheckRule(
    id="roce.gid_index",
    quantity=f"the GID that {INDEX_VARIABLE} names",
    severity="FAIL",
    threshold=ROCE_V2,
    unit="",
    source="NCCL (NCCL_IB_GID_INDEX); RoCE v1 is not routed",
    remedy=f"set {INDEX_VARIABLE} to the index of a RoCE v2 GID with an IPv4 address, or unset it: NCCL 2.21 "
    f"and newer find "
    "it",
    command="show_gids {device}",
)
RULES = (ROUTABLE, CHOSEN)


def check(machine: Machine, expected: Expectations) -> list[DoctorFinding]:
    """Check the active ports that NCCL would use."""
    roce_ports = {
        name: port
        for name, port in rdma_ports.selected_ports(machine, expected).items()
        if port.roce and (machine.read(f"{port.path}/state") or "").startswith("4:")
    }
    if not roce_ports:
        raise CheckSkipped("no RoCE port is up")
    index = machine.environment.get(INDEX_VARIABLE, "-1")
    kinds = {name: _gid_kinds(machine, port) for name, port in roce_ports.items()}
    selected_kinds = {name: gid_kinds.get(index, "none") for name, gid_kinds in kinds.items()}
    accepted_kinds = (
        (ROCE_V2,) if index == "-1" else (ROCE_V2, LINK_LOCAL_ROCE_V2)
    )  # on a flat network a link-local GID may be intended
    routable_counts = {
        name: sum(kind in accepted_kinds for kind in gid_kinds.values()) for name, gid_kinds in kinds.items()
    }
    chosen = check_values(CHOSEN, selected_kinds, lambda kind: kind not in accepted_kinds)
    return [
        *check_values(ROUTABLE, routable_counts, lambda count: count < 1),
        *([CHOSEN.skip(f"{INDEX_VARIABLE} is not set")] if index == "-1" else chosen),
    ]


def _gid_kinds(machine: Machine, port: rdma_ports.Port) -> dict[str, str]:
    """Return the kind of each non-zero GID by index."""
    kinds = {}
    for path in machine.glob(f"{port.path}/gids/*"):
        index = path.rpartition("/")[2]
        gid = machine.read(path) or ""
        if gid.replace(":", "").strip("0"):
            kind = machine.read(f"{port.path}/gid_attrs/types/{index}") or "unknown"
            kinds[index] = LINK_LOCAL_ROCE_V2 if kind == ROCE_V2 and gid.startswith(LINK_LOCAL_PREFIX) else kind
    return kinds

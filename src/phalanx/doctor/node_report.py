"""Report that a node writes for the comparison of nodes. Free of pydantic, for check processes of `doctor`."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.doctor.finding import DoctorFinding
from phalanx.doctor.node_facts import Facts


@dataclass(frozen=True, kw_only=True)
class NodeReport:
    """The report of a node."""

    host: str
    clock_offset_seconds: float
    """Offset of the node's clock from the clock that stamps files of the shared storage."""
    facts: Facts
    findings: tuple[DoctorFinding, ...]
    job_nodes: tuple[str, ...] = ()
    """The nodes of the same job, which also write a report, if they are known."""

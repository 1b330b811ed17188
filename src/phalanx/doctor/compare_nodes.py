"""Comparison of several nodes by the reports that each of them writes to shared storage."""

from __future__ import annotations

import json
import os
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median

from phalanx.debug.collective_log import is_peer_loss
from phalanx.doctor.finding import DoctorFinding, most_common
from phalanx.doctor.node_facts import NodeReport
from phalanx.doctor.rules import RULES
from phalanx.runs.hang_dumps import FAILURES_DIR, read_failures
from phalanx.spec.errors import UserError
from phalanx.spec.files.tables import parse_json

REPORT_SUFFIX = ".node.json"
COLLECTIVES_FILE = "collectives.json"
"""The file with the measurements that all ranks make together (`phalanx.doctor.multi_node_benchmark`)."""
USER_ERROR_CODE = 2
"""The code of a failure that the user must fix, and that blames no host."""


def storage_clock(directory: Path) -> float:
    """Return how many seconds this host's clock is ahead of the clock that stamps files in a directory.

    A file server stamps files with its own clock, so nodes can be compared without communication. The accuracy is about
    the time in which a file is written. Lustre and Spectrum Scale stamp files with the writer's clock: there the result
    is always about 0.
    """
    with tempfile.NamedTemporaryFile(dir=directory) as file:
        before = time.time()
        os.write(file.fileno(), b"now")
        os.fsync(file.fileno())
        return (before + time.time()) / 2 - os.stat(file.name).st_mtime


def write_node_report(directory: Path, node: NodeReport) -> Path:
    """Write the report of a node, and return the file."""
    file = directory / f"{re.sub(r'[^A-Za-z0-9._-]', '_', node.host)}{REPORT_SUFFIX}"
    partial_file = file.with_suffix(".part")
    partial_file.write_text(json.dumps(asdict(node), indent=1))
    partial_file.replace(file)
    return file


def read_node_reports(directory: Path) -> list[NodeReport]:
    """Return the reports of the nodes in a directory.

    Raises UserError if the directory contains no report, or an invalid one.
    """
    files = sorted(directory.glob(f"*{REPORT_SUFFIX}"))
    if not files:
        fix = "run `phalanx doctor --save-report` with this directory on every node"
        raise UserError("--compare-reports", str(directory), f"has no *{REPORT_SUFFIX}", fix=fix)
    return [_read_node_report(file) for file in files]


def stale_report_findings(directory: Path) -> list[DoctorFinding]:
    """Return the nodes whose report is much older than the newest."""
    rule = RULES["nodes.old"]
    written_at = {_read_node_report(file).host: file.stat().st_mtime for file in directory.glob(f"*{REPORT_SUFFIX}")}
    minutes = {host: round((max(written_at.values()) - seconds) / 60) for host, seconds in written_at.items()}
    stale = [rule.violation("", age, host=host) for host, age in minutes.items() if age > rule.limit]
    return stale or [rule.ok(max(minutes.values()))]


def collective_findings(directory: Path) -> list[DoctorFinding]:
    """Return the findings of the ranks' measurement, or its failures; for an old one only that it is old.

    Raises UserError if the file of findings has another format.
    """
    failed = RULES["between.failed"]
    old = RULES["nodes.old"]
    files = [*directory.glob(COLLECTIVES_FILE), *(directory / FAILURES_DIR).glob("rank-*.json")]
    if not files:
        return [failed.skip("no collectives were measured (phalanx.doctor.multi_node_benchmark)")]
    nodes = [file.stat().st_mtime for file in directory.glob(f"*{REPORT_SUFFIX}")]
    minutes = round((max(nodes, default=0) - max(file.stat().st_mtime for file in files)) / 60)
    if minutes > old.limit:
        return [old.violation(files[-1].name, minutes)]
    findings = failed_rank_findings(directory) or [failed.ok("all")]
    file = directory / COLLECTIVES_FILE
    try:
        if file.exists():
            findings += [DoctorFinding(**finding) for finding in parse_json(file.read_bytes())]
    except (OSError, ValueError, TypeError) as error:
        problem = f"is not a file of phalanx.doctor.multi_node_benchmark ({type(error).__name__})"
        raise UserError("--compare-reports", str(file), problem, fix="remove it, and measure again") from None
    return findings


def failed_rank_findings(directory: Path) -> list[DoctorFinding]:
    """Return why ranks failed, each reason of a host once.

    Ranks that only lost a peer are reported only if no other rank failed, and blame no host. Errors in the run file
    blame no host either.
    """
    failures = list(read_failures(directory).values())
    primary = [failure for failure in failures if not is_peer_loss(str(failure.get("reason")))]
    ranks = {}
    for failure in reversed(primary or failures[:1]):
        blames_host = primary and failure.get("code") != USER_ERROR_CODE
        host = str(failure.get("host", "")) if blames_host else ""
        ranks[host, str(failure.get("reason"))] = failure["rank"]
    rule = RULES["between.failed"]
    return [rule.violation(f"rank {rank}", reason, host=host) for (host, reason), rank in reversed(ranks.items())]


def _read_node_report(file: Path) -> NodeReport:
    try:
        report = parse_json(file.read_bytes())
        return NodeReport(
            host=str(report["host"]),
            clock_offset_seconds=float(report["clock_offset_seconds"]),
            facts=dict(report["facts"]),
            findings=tuple(DoctorFinding(**finding) for finding in report["findings"]),
            job_nodes=tuple(map(str, report.get("job_nodes", ()))),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        problem = f"is not a node report ({type(error).__name__})"
        fix = "run `phalanx doctor --save-report` on that node again"
        raise UserError("--compare-reports", str(file), problem, fix=fix) from None


def compare_nodes(nodes: Sequence[NodeReport], expected_nodes: int = 0) -> list[DoctorFinding]:
    """Return the differences of each node from the majority, by facts and clocks.

    `expected_nodes` is the number of nodes that should have written a report.
    """
    names = sorted({name for node in nodes for name in node.facts})
    drift = [finding for name in names for finding in _find_drift(name, nodes)]
    # Without names of nodes, only the number of reports is known.
    rule = RULES["nodes.missing"]
    missing_hosts = {name for node in nodes for name in node.job_nodes} - {node.host for node in nodes}
    missing = [rule.violation("", "no report", "one per node", host=host) for host in sorted(missing_hosts)]
    return [
        *(missing or rule.check(len(nodes), limit=expected_nodes)),
        *(drift or [RULES["nodes.drift"].ok(f"{len(nodes)} nodes agree in {len(names)} facts")]),
        *clock_skew_findings({node.host: node.clock_offset_seconds for node in nodes}),
    ]


def clock_skew_findings(clock_offsets_seconds: Mapping[str, float]) -> list[DoctorFinding]:
    """Return the hosts whose clock offset, from a common reference, is far from the median."""
    rule = RULES["nodes.clock"]
    median_offset = median(clock_offsets_seconds.values())
    deviations = {host: round(seconds - median_offset, 1) for host, seconds in clock_offsets_seconds.items()}
    skewed = {host: seconds for host, seconds in deviations.items() if abs(seconds) > rule.limit}
    violations = [rule.violation("clock", seconds, host=host) for host, seconds in skewed.items()]
    return violations or [rule.ok(max(map(abs, deviations.values())))]


def _find_drift(name: str, nodes: Sequence[NodeReport]) -> list[DoctorFinding]:
    """Return the nodes that differ from the majority, or one finding of no host without a majority."""
    rule = RULES["nodes.drift_breaks" if name in RULES["nodes.drift_breaks"].inputs else "nodes.drift"]
    values = {node.host: node.facts.get(name, "none") for node in nodes}
    majority = most_common(values.values())
    if len(set(values.values())) == 1 or majority is None:
        return []
    if 2 * list(values.values()).count(majority) <= len(nodes):
        listed = "; ".join(f"{host}: {value}" for host, value in values.items())
        return [rule.violation(name, listed, "equal on all nodes")]
    return [rule.violation(name, value, majority, host=host) for host, value in values.items() if value != majority]

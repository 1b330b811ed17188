"""Reports of findings: JSON, Markdown, and the list of nodes that a job should exclude."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from phalanx.doctor.finding import DoctorFinding
from phalanx.spec.errors import UserError

SEVERITY_ORDER = ("FAIL", "WARN", "SKIP", "OK")
FAILING_NODES_FILE = "failing_nodes.txt"
"""The file for `srun --exclude=$(cat failing_nodes.txt)`."""


def exit_code(findings: Iterable[DoctorFinding]) -> int:
    """Return 0 if all is OK, 1 for warnings, 2 for failures, 3 if nothing could be checked."""
    severities = {finding.severity for finding in findings}
    if "FAIL" in severities:
        return 2
    if "WARN" in severities:
        return 1
    return 0 if "OK" in severities else 3


def sort_by_severity(findings: Iterable[DoctorFinding]) -> list[DoctorFinding]:
    """Return the findings, the most severe first."""
    return sorted(findings, key=lambda finding: SEVERITY_ORDER.index(finding.severity))


def failing_hosts(findings: Iterable[DoctorFinding]) -> list[str]:
    """Return the hosts with failures."""
    return sorted({finding.host for finding in findings if finding.severity == "FAIL" and finding.host})


def to_markdown(findings: Sequence[DoctorFinding], title: str) -> str:
    """Return a Markdown page with a table of problems, a list of skipped rules, and counts by severity."""
    wrong = [finding for finding in sort_by_severity(findings) if finding.severity in ("FAIL", "WARN")]
    skipped = [finding for finding in findings if finding.severity == "SKIP"]
    counts = [(severity, sum(finding.severity == severity for finding in findings)) for severity in SEVERITY_ORDER]
    lines = [f"# {title}", "", ", ".join(f"{count} {severity}" for severity, count in counts), ""]
    if wrong:
        lines += [
            "| | finding | host | device | measured | should be | remedy | command |",
            "|---|---|---|---|---|---|---|---|",
        ]
        lines += [_format_table_row(finding) for finding in wrong] + [""]
    if skipped:
        lines += ["Not checked:", ""]
        lines += [f"- {_escape_cell(f'{finding.host} {finding.id}: {finding.measured}')}" for finding in skipped] + [""]
    return "\n".join(lines)


def _format_table_row(finding: DoctorFinding) -> str:
    measured = f"{finding.measured} {finding.unit}".strip()
    cells = (
        finding.severity,
        finding.id,
        finding.host,
        finding.device,
        measured,
        finding.threshold,
        finding.remedy,
        f"`{finding.command}`",
    )
    return f"| {' | '.join(map(_escape_cell, cells))} |"


def _escape_cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def write_reports(directory: Path, findings: Sequence[DoctorFinding], title: str) -> None:
    """Write findings.json, findings.md and failing_nodes.txt.

    Raises UserError if the directory contains files of these names that the doctor did not write.
    """
    directory.mkdir(parents=True, exist_ok=True)
    others = [name for name in ("findings.md", FAILING_NODES_FILE) if (directory / name).exists()]
    # The doctor writes findings.json first.
    if others and not (directory / "findings.json").exists():
        problem = f"contains a {others[0]} that phalanx did not write"
        raise UserError("directory", str(directory), problem, fix="give another directory, or move the file")
    listed = [asdict(finding) for finding in sort_by_severity(findings)]
    (directory / "findings.json").write_text(json.dumps(listed, indent=1) + "\n")
    (directory / "findings.md").write_text(to_markdown(findings, title))
    (directory / FAILING_NODES_FILE).write_text(",".join(failing_hosts(findings)) + "\n")

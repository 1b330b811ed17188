"""Output of `phalanx doctor`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from phalanx.cli.common.text import text_table
from phalanx.doctor.finding import DoctorFinding
from phalanx.doctor.report import failing_hosts, sort_by_severity
from phalanx.spec.terminal import Terminal

STYLES = {"FAIL": "bold red", "WARN": "yellow"}
MIN_TABLE_WIDTH = 110
"""Terminal width below which a finding has lines instead of columns."""
SEVERITY_LABELS = (("FAIL", "failures"), ("WARN", "warnings"), ("OK", "passed"), ("SKIP", "not checked"))


def print_findings(findings: Sequence[DoctorFinding]) -> None:
    """Print problems with their fixes, then skipped checks with reasons, then passed checks."""
    console = Terminal(highlight=False)
    problems = [finding for finding in sort_by_severity(findings) if finding.severity in STYLES]
    hosts = {finding.host for finding in findings if finding.host}
    if problems:
        is_wide = console.width >= MIN_TABLE_WIDTH
        console.print(
            _build_findings_table(problems, len(hosts) > 1)
            if is_wide
            else _build_findings_list(problems, len(hosts) > 1)
        )
        console.print()
    ids_by_reason: dict[str, dict[str, None]] = {}
    for finding in findings:
        if finding.severity == "SKIP":
            ids_by_reason.setdefault(str(finding.measured), {})[finding.id] = None
    for reason, ids in ids_by_reason.items():
        console.print(Text(f"not checked: {', '.join(ids)}: {reason}", "dim"), soft_wrap=True)
    ok_counts = Counter(finding.id.partition(".")[0] for finding in findings if finding.severity == "OK")
    if ok_counts:
        listed = ", ".join(f"{family} {count}" for family, count in ok_counts.items())
        console.print(Text(f"passed checks: {listed}", "dim"), soft_wrap=True)
    num_by_severity = Counter[str](finding.severity for finding in findings)
    counts = ", ".join(f"{num_by_severity[kind]} {name}" for kind, name in SEVERITY_LABELS)
    console.print(f"\n{', '.join(sorted(hosts)) or 'ranks'}: {counts}", style="bold", soft_wrap=True)
    if len(hosts) > 1 and failing_hosts(findings):
        console.print(f"leave out: --exclude={','.join(failing_hosts(findings))}", soft_wrap=True)


def _build_findings_table(problems: Sequence[DoctorFinding], several: bool) -> Table:
    table = text_table()
    for name in ("", "finding", *(["host"] if several else []), "device", "measured", "should be", "what to do"):
        table.add_column(name, overflow="fold", no_wrap=not name, ratio=2 if name == "what to do" else None)
    for finding in problems:
        measured = f"{finding.measured} {finding.unit}".strip()
        remedy = Text(finding.remedy) + Text(f"\n{finding.command}", "dim")
        host = [Text(finding.host)] if several else []
        cells = [Text(finding.id), *host, Text(finding.device), Text(measured), Text(finding.threshold), remedy]
        table.add_row(Text(finding.severity, STYLES[finding.severity]), *cells)
    return table


def _build_findings_list(problems: Sequence[DoctorFinding], several: bool) -> Table:
    """Return the findings below each other, for a narrow terminal."""
    grid = Table.grid(padding=(0, 1))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for finding in problems:
        title = " ".join(filter(None, (finding.id, finding.host if several else "", finding.device)))
        measured = f"measured: {finding.measured} {finding.unit}".strip()
        lines = "\n".join([title, measured, f"should be: {finding.threshold}", f"what to do: {finding.remedy}"])
        severity = Text(finding.severity, STYLES[finding.severity])
        grid.add_row(severity, Text(lines) + Text(f"\n{finding.command}", "dim"))
    return grid

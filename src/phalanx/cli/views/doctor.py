"""What `phalanx doctor` prints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from phalanx.doctor.finding import DoctorFinding
from phalanx.doctor.report import by_severity, failing_hosts

STYLES = {"FAIL": "bold red", "WARN": "yellow"}
NAMES = (("FAIL", "failures"), ("WARN", "warnings"), ("OK", "well"), ("SKIP", "not checked"))


def print_findings(found: Sequence[DoctorFinding]) -> None:
    """What is wrong and what to do, then what was not looked at and why, then what is well."""
    console = Console(highlight=False)
    wrong = [each for each in by_severity(found) if each.severity in STYLES]
    hosts = {each.host for each in found if each.host}
    if wrong:
        console.print(_table(wrong, len(hosts) > 1))
        console.print()
    for reason, ids in _reasons([each for each in found if each.severity == "SKIP"]).items():
        console.print(Text(f"not checked: {', '.join(ids)}: {reason}", "dim"), soft_wrap=True)
    well = Counter(each.id.partition(".")[0] for each in found if each.severity == "OK")
    if well:
        listed = ", ".join(f"{count} of {room}" for room, count in well.items())
        console.print(Text(f"well: {listed}", "dim"), soft_wrap=True)
    counts = ", ".join(f"{sum(each.severity == kind for each in found)} {name}" for kind, name in NAMES)
    console.print(f"\n{', '.join(sorted(hosts)) or 'ranks'}: {counts}", style="bold", soft_wrap=True)
    if len(hosts) > 1 and failing_hosts(found):
        console.print(f"leave out: --exclude={','.join(failing_hosts(found))}", soft_wrap=True)


def _table(wrong: Sequence[DoctorFinding], several: bool) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for name in ("", "finding", *(["host"] if several else []), "device", "measured", "should be", "what to do"):
        table.add_column(name, overflow="fold", no_wrap=not name, ratio=2 if name == "what to do" else None)
    for each in wrong:
        measured = f"{each.measured} {each.unit}".strip()
        what_to_do = Text(each.remedy) + Text(f"\n{each.command}", "dim")
        host = [Text(each.host)] if several else []
        cells = [Text(each.id), *host, Text(each.device), Text(measured), Text(each.threshold), what_to_do]
        table.add_row(Text(each.severity, STYLES[each.severity]), *cells)
    return table


def _reasons(skipped: Sequence[DoctorFinding]) -> dict[str, list[str]]:
    """What was not looked at, by why."""
    reasons: dict[str, list[str]] = {}
    for each in skipped:
        mine = reasons.setdefault(str(each.measured), [])
        mine += [each.id] if each.id not in mine else []
    return reasons

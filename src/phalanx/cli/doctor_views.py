"""What `phalanx doctor` prints."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from phalanx.measure.doctor.finding import Finding
from phalanx.measure.doctor.report import failing, ordered

STYLES = {"FAIL": "bold red", "WARN": "yellow"}


def show(found: Sequence[Finding]) -> None:
    """What is wrong and what to do, then what was not looked at and why, then what is well."""
    console = Console(highlight=False)
    wrong = [each for each in ordered(found) if each.severity in STYLES]
    hosts = {each.host for each in found if each.host}
    if wrong:
        console.print(_table(wrong, len(hosts) > 1))
        console.print()
    for severity, title in (("SKIP", "not checked"), ("OK", "well")):
        for line in _lines([each for each in found if each.severity == severity], severity == "SKIP"):
            console.print(Text(f"{title}: {line}", "dim"), soft_wrap=True)
    counts = ", ".join(f"{sum(each.severity == kind for each in found)} {name}" for kind, name in _NAMES)
    console.print(f"\n{', '.join(sorted(hosts)) or 'ranks'}: {counts}", style="bold", soft_wrap=True)
    if len(hosts) > 1 and failing(found):
        console.print(f"leave out: --exclude={','.join(failing(found))}", soft_wrap=True)


_NAMES = (("FAIL", "failures"), ("WARN", "warnings"), ("OK", "well"), ("SKIP", "not checked"))


def _table(wrong: Sequence[Finding], several: bool) -> Table:
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


def _lines(found: Sequence[Finding], by_reason: bool) -> list[str]:
    """Names; of what was skipped those with the same reason in a line."""
    if not by_reason:
        return [", ".join(dict.fromkeys(each.id for each in found))] if found else []
    reasons: dict[str, list[str]] = {}
    for each in found:
        reasons.setdefault(str(each.measured), []).append(each.id)
    return [f"{', '.join(dict.fromkeys(ids))}: {reason}" for reason, ids in reasons.items()]

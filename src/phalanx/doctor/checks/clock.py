"""The host's clock. The comparison of nodes checks the offset between hosts."""

from __future__ import annotations

import re

from phalanx.doctor.expectations import Expectations
from phalanx.doctor.finding import CheckRule, CheckSkipped, DoctorFinding, check_values
from phalanx.doctor.machine import Machine

MAX_OFFSET_SECONDS = 30
SYNCHRONISED = CheckRule(
    id="clock.synchronised",
    quantity="clock synchronization with a server",
    severity="WARN",
    threshold="yes",
    unit="",
    source="Primus (clock skew 30 s)",
    remedy="start chronyd or systemd-timesyncd, and let it reach its server",
    command="systemctl enable --now chronyd; chronyc sources",
)
OFFSET = CheckRule(
    id="clock.offset",
    quantity="offset of the clock from the server's",
    severity="FAIL",
    threshold=f"at most {MAX_OFFSET_SECONDS}",
    unit="s",
    source="Primus (clock skew 30 s)",
    remedy="set the clock",
    command="chronyc makestep",
)
RULES = (SYNCHRONISED, OFFSET)
UNKNOWN = [OFFSET.skip("known to chronyc only: compare several nodes (--save-report, --compare-reports)")]


def check(machine: Machine, _: Expectations) -> list[DoctorFinding]:
    """Check the clock by chrony if it runs, else by systemd."""
    output = machine.run("chrony", "chronyc", "-n", "tracking")
    if output is not None and output.code == 0:
        status = re.search(r"^Leap status\s*: (.+)$", output.text, re.MULTILINE)
        offset = re.search(r"^System time\s*: ([\d.]+) seconds", output.text, re.MULTILINE)
        sync_findings = check_values(SYNCHRONISED, {"": status[1]}, "Not synchronised".__eq__) if status else []
        offset_findings = (
            check_values(OFFSET, {"": float(offset[1])}, lambda seconds: seconds > MAX_OFFSET_SECONDS)
            if offset
            else UNKNOWN
        )
        return [*sync_findings, *offset_findings]
    output = machine.run("timedatectl", "timedatectl", "show")
    synchronised = re.search(r"^NTPSynchronized=(yes|no)$", output.text if output else "", re.MULTILINE)
    if synchronised is None:
        raise CheckSkipped("neither chronyc nor timedatectl answers")
    return [*check_values(SYNCHRONISED, {"": synchronised[1]}, lambda value: value == "no"), *UNKNOWN]

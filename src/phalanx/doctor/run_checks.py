"""All checks of one machine.

On this machine, each check has its own child process: reading a file of a hung driver blocks in the kernel, and must
block no other check.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from phalanx.doctor import error_counters
from phalanx.doctor.checks import (
    clock,
    cpu,
    disk,
    ecc,
    gpus,
    kernel_log,
    limits,
    memory,
    mtu,
    nccl_log,
    nccl_variables,
    network,
    nvlink,
    pcie,
    rdma_ports,
    roce,
    roce_gid,
    software,
    topology,
)
from phalanx.doctor.expectations import Expectations
from phalanx.doctor.finding import CheckRule, CheckSkipped, DoctorFinding
from phalanx.doctor.machine import CommandTimeout, Machine
from phalanx.doctor.node_facts import Facts, job_nodes, node_facts
from phalanx.doctor.node_report import NodeReport
from phalanx.doctor.subprocesses import TimedProcess

CHECKS = (
    gpus,
    ecc,
    nvlink,
    topology,
    pcie,
    software,
    rdma_ports,
    roce_gid,
    mtu,
    roce,
    network,
    nccl_variables,
    nccl_log,
    limits,
    memory,
    disk,
    clock,
    cpu,
    kernel_log,
)
"""Modules with RULES and `check(machine, expected)`."""
CHECK_SECONDS = 50
"""Time limit of all checks together: more than that of any program, and less than --quick's minute."""
STUCK = CheckRule(
    id="doctor.stuck",
    quantity="completion of a check",
    severity="FAIL",
    threshold="before its time limit",
    unit="s",
    source="ours: a program that hangs here also hangs a run",
    remedy="find out why {device} hangs; a hung driver needs a reboot",
    command="cat /proc/PID/stack; dmesg | tail",
)
UNREADABLE = CheckRule(
    id="doctor.unreadable",
    quantity="parsing of a program's output",
    severity="WARN",
    threshold="succeeds",
    unit="",
    source="ours",
    remedy="attach a snapshot of this machine (phalanx doctor --save-snapshot DIR) to a bug report",
    command="phalanx doctor --save-snapshot DIR",
)
RULES = (STUCK, UNREADABLE)
FACTS = "facts"
MODULE = "phalanx.doctor.run_checks"
Check = Callable[[Machine, Expectations], list[DoctorFinding]]


def run_all_checks(machine: Machine, expected: Expectations, with_facts: bool = False) -> list[DoctorFinding]:
    """Return the findings of all checks, in their order, with the host's name.

    Args:
        machine: The machine.
        expected: The requirements of the run.
        with_facts: Whether to collect the facts for the comparison of nodes; they are not returned.
    """
    return list(examine_node(machine, expected, with_facts).findings)


def examine_node(
    machine: Machine, expected: Expectations, with_facts: bool = True, clock_offset_seconds: float = 0.0
) -> NodeReport:
    """Return the findings of all checks, with the facts for the comparison of nodes.

    Args:
        machine: The machine.
        expected: The requirements of the run.
        with_facts: Whether to collect the facts.
        clock_offset_seconds: The offset of the host's clock (`storage_clock`).
    """
    if machine.root is None:
        findings, facts = _run_in_subprocesses(machine, expected, with_facts)
    else:
        findings = [finding for module in CHECKS for finding in run_check(module, machine, expected)]
        facts = node_facts(machine) if with_facts else {}
    findings_with_host = tuple(replace(finding, host=finding.host or machine.host) for finding in findings)
    return NodeReport(
        host=machine.host,
        clock_offset_seconds=clock_offset_seconds,
        facts=facts,
        findings=findings_with_host,
        job_nodes=job_nodes(machine) if with_facts else (),
    )


def check_name(check: object) -> str:
    """Return the name of a check: that of its file."""
    return str(getattr(check, "__name__", "")).rpartition(".")[2]


def run_check(module: object, machine: Machine, expected: Expectations) -> list[DoctorFinding]:
    """Run one check, and return its findings or one finding on its failure.

    Args:
        module: Module of the check, with a function `check`.
        machine: Machine to examine.
        expected: Requirements of the run.
    """
    name = check_name(module)
    check: Check = module.check  # type: ignore[attr-defined]
    try:
        return check(machine, expected)
    except CheckSkipped as skipped:
        return [
            DoctorFinding(
                id=name,
                severity="SKIP",
                host="",
                device="",
                measured=str(skipped),
                unit="",
                threshold="",
                source="",
                remedy="",
                command="",
            )
        ]
    except CommandTimeout as timeout:
        return [STUCK.violation(timeout.command, str(timeout))]
    except Exception as error:  # an unknown format of some output
        return [UNREADABLE.violation(name, f"{type(error).__name__}: {error}")]


def _run_in_subprocesses(
    machine: Machine, expected: Expectations, with_facts: bool
) -> tuple[list[DoctorFinding], Facts]:
    request = json.dumps({**asdict(expected), "record": str(machine.record or "")})
    names = [*map(check_name, CHECKS), *([FACTS] if with_facts else [])]
    children = {name: _start_child(name, request) for name in names}
    deadline = time.monotonic() + CHECK_SECONDS
    findings: list[DoctorFinding] = []
    facts: Facts = {}
    for name, child in children.items():
        result = _child_result(name, child, deadline)
        if isinstance(result, DoctorFinding):
            findings.append(result)
        elif name == FACTS:
            facts = result
        else:
            findings += [DoctorFinding(**fields) for fields in result]
    return findings, facts


def _start_child(name: str, request: str) -> TimedProcess | DoctorFinding:
    try:
        return TimedProcess([sys.executable, "-P", "-m", MODULE, name, request])
    except OSError as error:  # no memory, or too many processes
        return UNREADABLE.violation(name, f"cannot be started: {error}")


def _child_result(name: str, child: TimedProcess | DoctorFinding, deadline: float) -> Any:
    """Return the result of a child process, or a finding that it has none."""
    if isinstance(child, DoctorFinding):
        return child
    answer = child.wait_output(max(0.0, deadline - time.monotonic()))
    last_line = answer.text.strip().rpartition("\n")[2]
    if answer.code is None:
        return STUCK.violation(name, f"no answer in {CHECK_SECONDS} s")
    try:
        return json.loads(last_line)
    except ValueError:
        return UNREADABLE.violation(name, last_line or f"exit code {answer.code}")


def main() -> None:
    """Run one check, or collect the facts, in this process: arguments are its name and the requirements."""
    name = sys.argv[1]
    request = json.loads(sys.argv[2])
    record = request.pop("record")
    machine = Machine(record=Path(record) if record else None)
    if name == FACTS:
        if machine.record:
            error_counters.read_counters(machine)
        print(json.dumps(node_facts(machine)))
        return
    module = next(module for module in CHECKS if check_name(module) == name)
    print(json.dumps([asdict(finding) for finding in run_check(module, machine, Expectations(**request))]))


if __name__ == "__main__":
    main()

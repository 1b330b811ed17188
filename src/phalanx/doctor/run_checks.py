"""All checks of one machine.

On this machine, each check has its own child process: reading a file of a hung driver blocks in the kernel, and must
block no other check.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from pathlib import Path

from phalanx.doctor import error_counters
from phalanx.doctor.checks import disk, gpu, kernel_log, links, nccl, network, node, software
from phalanx.doctor.expectations import Expectations
from phalanx.doctor.finding import CheckSkipped, DoctorFinding
from phalanx.doctor.machine import CommandTimeout, Machine
from phalanx.doctor.node_facts import Facts, NodeReport, job_nodes, node_facts
from phalanx.doctor.probes.text import last_line
from phalanx.doctor.rules import RULES
from phalanx.doctor.subprocesses import TimedProcess

Check = Callable[[Machine, Expectations], Iterable[DoctorFinding]]
CHECKS: dict[str, Check] = {
    "gpus": gpu.check_gpus,
    "ecc": gpu.check_ecc,
    "nvlink": links.check_nvlink,
    "topology": links.check_topology,
    "pcie": links.check_pcie,
    "software": software.check_software,
    "rdma_ports": network.check_rdma_ports,
    "roce_gid": network.check_roce_gid,
    "mtu": network.check_mtu,
    "roce": network.check_roce,
    "network": network.check_socket_network,
    "nccl_variables": nccl.check_variables,
    "nccl_log": nccl.check_log,
    "limits": node.check_limits,
    "memory": node.check_memory,
    "disk": disk.check_disk,
    "clock": node.check_clock,
    "cpu": node.check_cpu,
    "kernel_log": kernel_log.check_kernel_log,
}
"""The checks of one machine by name. A section of rules.toml has the rules of a check."""
CHECK_SECONDS = 50
"""Time limit of all checks together: more than that of any program, and less than --quick's minute."""
FACTS = "facts"
MODULE = "phalanx.doctor.run_checks"


def run_all_checks(machine: Machine, expected: Expectations, with_facts: bool = False) -> list[DoctorFinding]:
    """Return the findings of all checks, in their order, with the host's name.

    With `with_facts`, a snapshot also records the facts for the comparison of nodes.
    """
    return list(examine_node(machine, expected, with_facts).findings)


def examine_node(
    machine: Machine, expected: Expectations, with_facts: bool = True, clock_offset_seconds: float = 0.0
) -> NodeReport:
    """Return the findings of all checks, with the facts for the comparison of nodes.

    `clock_offset_seconds` is the offset of the host's clock (`storage_clock`).
    """
    if machine.root is None:
        findings, facts = _run_in_subprocesses(machine, expected, with_facts)
    else:
        findings = [finding for name in CHECKS for finding in run_check(name, machine, expected)]
        facts = node_facts(machine) if with_facts else {}
    findings_with_host = tuple(replace(finding, host=finding.host or machine.host) for finding in findings)
    return NodeReport(
        host=machine.host,
        clock_offset_seconds=clock_offset_seconds,
        facts=facts,
        findings=findings_with_host,
        job_nodes=job_nodes(machine) if with_facts else (),
    )


def run_check(name: str, machine: Machine, expected: Expectations) -> list[DoctorFinding]:
    """Run one check, and return its findings or one finding on its failure."""
    try:
        return list(CHECKS[name](machine, expected))
    except CheckSkipped as skipped:
        texts = dict.fromkeys(("host", "device", "unit", "threshold", "source", "remedy", "command"), "")
        return [DoctorFinding(id=name, severity="SKIP", measured=str(skipped), **texts)]
    except CommandTimeout as timeout:
        return [RULES["doctor.stuck"].violation(timeout.command, str(timeout))]
    except Exception as error:  # an unknown format of some output
        return [RULES["doctor.unreadable"].violation(name, f"{type(error).__name__}: {error}")]


def _run_in_subprocesses(
    machine: Machine, expected: Expectations, with_facts: bool
) -> tuple[list[DoctorFinding], Facts]:
    request = json.dumps({**asdict(expected), "record": str(machine.record or "")})
    children: dict[str, TimedProcess | DoctorFinding] = {}
    for name in (*CHECKS, *([FACTS] if with_facts else [])):
        try:
            children[name] = TimedProcess([sys.executable, "-P", "-m", MODULE, name, request])
        except OSError as error:
            # There is no memory, or there are too many processes.
            children[name] = RULES["doctor.unreadable"].violation(name, f"cannot be started: {error}")
    deadline = time.monotonic() + CHECK_SECONDS
    findings: list[DoctorFinding] = []
    facts: Facts = {}
    for name, child in children.items():
        if isinstance(child, DoctorFinding):
            findings.append(child)
            continue
        answer = child.wait_output(max(0.0, deadline - time.monotonic()))
        line = last_line(answer.text)
        if answer.code is None:
            findings.append(RULES["doctor.stuck"].violation(name, f"no answer in {CHECK_SECONDS} s"))
            continue
        try:
            result = json.loads(line)
        except ValueError:
            findings.append(RULES["doctor.unreadable"].violation(name, line or f"exit code {answer.code}"))
            continue
        if name == FACTS:
            facts = result
        else:
            findings += [DoctorFinding(**fields) for fields in result]
    return findings, facts


def main() -> None:
    """Run one check, or collect the facts, in this process: arguments are its name and the requirements."""
    name = sys.argv[1]
    request = json.loads(sys.argv[2])
    record = request.pop("record")
    machine = Machine(record=Path(record) if record else None)
    if name == FACTS:
        if machine.record:
            error_counters.read_counters(machine)
        print(json.dumps(node_facts(machine)))  # noqa: T201 -- the result
        return
    print(json.dumps([asdict(finding) for finding in run_check(name, machine, Expectations(**request))]))  # noqa: T201 -- the result


if __name__ == "__main__":
    main()

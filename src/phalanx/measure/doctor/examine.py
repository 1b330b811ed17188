"""All checks of one machine, each in a child process of its own where the machine is this one: a file of a driver that
hangs holds its reader for good, and must hold nobody else."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from phalanx.measure.doctor import (
    clock,
    cpu,
    disk,
    ecc,
    gid,
    gpus,
    kernel_log,
    limits,
    memory,
    mtu,
    nccl_log,
    nccl_variables,
    nvlinks,
    pcie,
    ports,
    roce,
    software,
    topology,
)
from phalanx.measure.doctor.children import Child
from phalanx.measure.doctor.expected import Expected
from phalanx.measure.doctor.finding import Finding, Rule, Skip
from phalanx.measure.doctor.machine import Machine, Stuck

CHECKS = (
    gpus, ecc, nvlinks, topology, pcie, software, ports, gid, mtu, roce, nccl_variables, nccl_log, limits, memory, disk,
    clock, cpu, kernel_log,
)  # fmt: skip
"""Each a file with RULES and `check(machine, expected)`."""
CHECK_SECONDS = 50
"""For all of them, which run at once: more than any one program may take, and less than --quick's minute."""
STUCK = Rule(
    "doctor.stuck", "whether a check ends", "FAIL", "in time", "s", "ours: what hangs here hangs a run",
    "find out why {device} hangs; a driver that does needs a reboot", "cat /proc/PID/stack; dmesg | tail",
)  # fmt: skip
UNREADABLE = Rule(
    "doctor.unreadable", "whether an answer can be understood", "WARN", "yes", "", "ours",
    "send a record of this machine (phalanx doctor --record DIR) with a bug report", "phalanx doctor --record DIR",
)  # fmt: skip
RULES = (STUCK, UNREADABLE)
Check = Callable[[Machine, Expected], list[Finding]]


def examine(machine: Machine, expected: Expected) -> list[Finding]:
    """What all checks find, in their order, with the host's name."""
    if machine.root is None:
        found = _apart(machine, expected)
    else:
        found = [each for file in CHECKS for each in findings(file, machine, expected)]
    return [replace(finding, host=machine.host) for finding in found]


def name_of(check: object) -> str:
    """A check's: that of its file."""
    return str(getattr(check, "__name__", "")).rpartition(".")[2]


def findings(file: object, machine: Machine, expected: Expected) -> list[Finding]:
    """What one check finds, whatever becomes of it."""
    name = name_of(file)
    check: Check = file.check  # type: ignore[attr-defined]
    try:
        return check(machine, expected)
    except Skip as skipped:
        return [Finding(name, "SKIP", "", "", str(skipped), "", "", "", "", "")]
    except Stuck as stuck:
        return [STUCK.broken(stuck.command, str(stuck))]
    except Exception as error:  # of what no parser has seen yet
        return [UNREADABLE.broken(name, f"{type(error).__name__}: {error}")]


def _apart(machine: Machine, expected: Expected) -> list[Finding]:
    asked = json.dumps({**asdict(expected), "record": str(machine.record or "")})
    words = sys.executable, "-m", "phalanx.measure.doctor.examine"
    children = {name_of(file): Child([*words, name_of(file), asked]) for file in CHECKS}
    deadline = time.monotonic() + CHECK_SECONDS
    return [each for name, child in children.items() for each in _told(name, child, deadline)]


def _told(name: str, child: Child, deadline: float) -> list[Finding]:
    answer = child.answer(max(0.0, deadline - time.monotonic()))
    if answer.code is None:
        return [STUCK.broken(name, f"check {name}: no answer in {CHECK_SECONDS} s")]
    try:
        return [Finding(**each) for each in json.loads(answer.text.strip().rpartition("\n")[2])]
    except (ValueError, TypeError):
        return [UNREADABLE.broken(name, answer.text.strip().rpartition("\n")[2] or f"exit code {answer.code}")]


def main() -> None:
    """One check, in a process of its own: its name, and what is expected."""
    name, asked = sys.argv[1], json.loads(sys.argv[2])
    record = asked.pop("record")
    machine = Machine(record=Path(record) if record else None)
    file = next(file for file in CHECKS if name_of(file) == name)
    print(json.dumps([asdict(finding) for finding in findings(file, machine, Expected(**asked))]))


if __name__ == "__main__":
    main()

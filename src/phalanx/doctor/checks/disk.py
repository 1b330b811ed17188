"""The disk to which runs write: space for checkpoints, and write speed."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from glob import escape
from pathlib import Path

from phalanx.doctor.expectations import Expectations
from phalanx.doctor.finding import DoctorFinding
from phalanx.doctor.machine import Machine
from phalanx.doctor.probes.host import DiskSpace, disk_space
from phalanx.doctor.probes.text import first_line, last_line
from phalanx.doctor.rules import RULES, skip_rules
from phalanx.spec.formatting import GB

MB = 1e6
WRITE_MIB = 256
QUICK_WRITE_MIB = 64
WRITE_SECONDS = 20


def check_disk(machine: Machine, expected: Expectations) -> Iterator[DoctorFinding]:
    """Check the disk of the run's output directory."""
    directory = expected.directory
    if not machine.root:
        # The nearest parent that exists.
        parents = (Path(directory), *Path(directory).parents)
        directory = str(next((path for path in parents if os.path.isdir(path)), directory))
    space = disk_space(machine, "df_runs", directory)
    if space is None:
        yield from skip_rules(f"df does not report {directory}", "disk.full", "disk.very_full", "disk.room")
    else:
        yield from _check_free_space(machine, space, directory, expected)
    yield from _check_write_speed(machine, directory, expected.quick)


def _check_free_space(
    machine: Machine, space: DiskSpace, directory: str, expected: Expectations
) -> Iterator[DoctorFinding]:
    very_full = RULES["disk.very_full"].check({directory: space.percent})
    yield from very_full
    if very_full[0].severity == "OK":
        yield from RULES["disk.full"].check({directory: space.percent})
    # The oldest checkpoint is removed after a new one was written.
    existing = machine.glob(f"{escape(expected.checkpoints)}/step-*[0-9]") if expected.checkpoints else []
    missing_bytes = (expected.checkpoints_bytes or 0) - len(existing) * expected.checkpoint_bytes
    needed_bytes = max(expected.checkpoint_bytes, missing_bytes)
    if needed_bytes:
        yield from RULES["disk.room"].check({directory: round(space.free_bytes / GB, 3)}, limit=needed_bytes / GB)
    else:
        yield RULES["disk.room"].skip("no run was given")


def _check_write_speed(machine: Machine, directory: str, quick: bool) -> Iterator[DoctorFinding]:
    size = str(QUICK_WRITE_MIB if quick else WRITE_MIB)
    argv = sys.executable, "-P", "-m", "phalanx.doctor.disk_write_probe", directory, size
    output = machine.run("write", *argv, seconds=WRITE_SECONDS)
    if output is None:
        yield RULES["disk.write"].skip("not recorded")
        return
    match = re.search(r"(\d+) bytes in ([\d.]+) s", output.text) if output.code == 0 else None
    if match is None:
        yield RULES["disk.writable"].violation(directory, first_line(last_line(output.text)))
        return
    yield RULES["disk.writable"].ok("yes")
    mb_per_second = round(int(match[1]) / max(float(match[2]), 1e-6) / MB)
    yield from RULES["disk.write"].check({directory: mb_per_second})

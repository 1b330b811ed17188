"""The disk to which runs write: space for checkpoints, and write speed."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from glob import escape
from pathlib import Path

from phalanx.doctor.expectations import Expectations
from phalanx.doctor.finding import CheckRule, DoctorFinding, check_values
from phalanx.doctor.machine import Machine
from phalanx.doctor.probes.nvidia_smi import first_line
from phalanx.spec.formatting import GB

FULL_WARN = 80
FULL_FAIL = 95
WRITE_MB_PER_SECOND = 100
MB = 1e6
WRITE_MIB = 256
QUICK_WRITE_MIB = 64
WRITE_SECONDS = 20
FULL = CheckRule(
    id="disk.full",
    quantity="share of the disk that is in use",
    severity="WARN",
    threshold=f"less than {FULL_WARN}",
    unit="%",
    source="GCM (80 %)",
    remedy="free space on {device}",
    command="df -h {device}; du -xh --max-depth=2 {device} | sort -h | tail",
)
VERY_FULL = CheckRule(
    id="disk.very_full",
    quantity="share of the disk that is in use",
    severity="FAIL",
    threshold=f"less than {FULL_FAIL}",
    unit="%",
    source="Imbue (disk >= 95 %)",
    remedy="free space on {device} before the run, which fails otherwise",
    command="df -h {device}; du -xh --max-depth=2 {device} | sort -h | tail",
)
ROOM = CheckRule(
    id="disk.room",
    quantity="free space",
    severity="FAIL",
    threshold="at least the checkpoints that the run keeps, and one more",
    unit="GB",
    source="the run (checkpoint.keep)",
    remedy="free space on {device}, set output_dir to a larger disk, or keep fewer (checkpoint.keep)",
    command="df -h {device}",
)
WRITE = CheckRule(
    id="disk.write",
    quantity="write speed of a synced file",
    severity="WARN",
    threshold=f"at least {WRITE_MB_PER_SECOND}",
    unit="MB/s",
    source="ours: a rank that saves 1 GB waits for 10 s",
    remedy="write to a faster disk (`output_dir` in the run file); check for other programs that write there",
    command="python -m phalanx.doctor.disk_write_probe {device} 256; iostat -x 1",
)
WRITABLE = CheckRule(
    id="disk.writable",
    quantity="write access",
    severity="FAIL",
    threshold="yes",
    unit="",
    source="ours",
    remedy="mount it read-write, or set `output_dir` to another directory",
    command="findmnt -T {device}; ls -ld {device}",
)
RULES = (FULL, VERY_FULL, ROOM, WRITABLE, WRITE)


@dataclass(frozen=True)
class Space:
    """Space of a file system."""

    size_bytes: int
    free_bytes: int
    """Free bytes that this user may fill."""
    percent: int
    """Used percentage of the space that this user may fill."""


def space(machine: Machine, name: str, path: str) -> Space | None:
    """Return the space of a path's file system, or None if df does not report it.

    Args:
        machine: The machine.
        name: The name of the recorded output.
        path: A path on the file system.
    """
    output = machine.run(name, "df", "-Pk", path)
    row = re.search(r"\s(\d+)\s+(\d+)\s+(\d+)\s+(\d+)%", output.text if output else "")
    return Space(int(row[1]) * 1024, int(row[3]) * 1024, int(row[4])) if row else None


def check(machine: Machine, expected: Expectations) -> list[DoctorFinding]:
    """Check the disk of the run's output directory."""
    directory = _existing_directory(machine, expected)
    disk_space = space(machine, "df_runs", directory)
    unknown = [rule.skip(f"df does not report {directory}") for rule in (FULL, VERY_FULL, ROOM)]
    return [
        *(_check_space(disk_space, directory, _needed_bytes(machine, expected)) if disk_space else unknown),
        *_check_write(machine, directory, expected.quick),
    ]


def _existing_directory(machine: Machine, expected: Expectations) -> str:
    """Return the output directory, or its nearest parent that exists."""
    directory = Path(expected.directory)
    if machine.root:
        return expected.directory
    return str(next((path for path in (directory, *directory.parents) if os.path.isdir(path)), directory))


def _needed_bytes(machine: Machine, expected: Expectations) -> int:
    """Return the space needed for checkpoints, without those that exist.

    The oldest checkpoint is removed after a new one was written.
    """
    pattern = f"{escape(expected.checkpoints)}/step-*[0-9]" if expected.checkpoints else ""
    num_checkpoints = len(machine.glob(pattern)) if pattern else 0
    return max(
        expected.checkpoint_bytes, (expected.checkpoints_bytes or 0) - num_checkpoints * expected.checkpoint_bytes
    )


def _check_space(disk_space: Space, directory: str, needed_bytes: int) -> list[DoctorFinding]:
    full = check_values(VERY_FULL, {directory: disk_space.percent}, lambda percent: percent >= FULL_FAIL)
    if full[0].severity == "OK":
        full += check_values(FULL, {directory: disk_space.percent}, lambda percent: percent >= FULL_WARN)
    free = {directory: round(disk_space.free_bytes / GB, 3)}
    threshold = f"at least {needed_bytes / GB:.3g}"
    return [
        *full,
        *(
            check_values(ROOM, free, lambda gb: gb < needed_bytes / GB, threshold=threshold)
            if needed_bytes
            else [ROOM.skip("no run was given")]
        ),
    ]


def _check_write(machine: Machine, directory: str, quick: bool) -> list[DoctorFinding]:
    size = str(QUICK_WRITE_MIB if quick else WRITE_MIB)
    argv = sys.executable, "-P", "-m", "phalanx.doctor.disk_write_probe", directory, size
    output = machine.run("write", *argv, seconds=WRITE_SECONDS)
    match = re.search(r"(\d+) bytes in ([\d.]+) s", output.text) if output and output.code == 0 else None
    if output is None:
        return [WRITE.skip("not recorded")]
    if match is None:
        return [WRITABLE.violation(directory, first_line(output.text.strip().rpartition("\n")[2]))]
    mb_per_second = round(int(match[1]) / max(float(match[2]), 1e-6) / MB)
    return [WRITABLE.ok("yes"), *check_values(WRITE, {directory: mb_per_second}, lambda mb: mb < WRITE_MB_PER_SECOND)]

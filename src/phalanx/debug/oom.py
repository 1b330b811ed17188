"""Out-of-memory reports: the cgroup's memory limit, kills by the OOM killer, and allocated memory."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from phalanx.runs.hang_dumps import describe_fault, read_dumps
from phalanx.runs.jsonl import read_valid_jsonl
from phalanx.runs.step_records import decode_rank_line, rank_record_file
from phalanx.spec.formatting import format_gb_or_mb

CGROUP_ROOT = Path("/sys/fs/cgroup")
PROCESS_CGROUP = Path("/proc/self/cgroup")
SUMS = ("total", "peak", "reserved")
"""Entries of allocated memory that are not parts of it."""


def cgroup_oom_kills() -> int | None:
    """Return the number of processes in this cgroup that the OOM killer has killed, or None if unknown.

    cgroup v2 counts in memory.events, v1 in memory.oom_control (Documentation/admin-guide/cgroup-v2.rst, and
    cgroup-v1/memory.rst).
    """
    for file in _find_cgroup_files("memory.events", "memory.oom_control"):
        for line in file.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
    return None


def physical_memory_bytes() -> int:
    """Return the memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def cgroup_memory_limit() -> int | None:
    """Return the memory limit of this cgroup in bytes, or None if it is absent or unknown."""
    for file in _find_cgroup_files("memory.max", "memory.limit_in_bytes"):
        text = file.read_text().strip()
        if text.isdecimal() and int(text) < 2**62:  # without a limit, v1 writes the largest number of pages
            return int(text)
    return None


def format_oom_report(record: Mapping[str, Any]) -> str:
    """Return a sentence on an out-of-memory record, or "" for an empty one."""
    if not record:
        return ""
    allocated = record["held_bytes"]
    requested_bytes = record["wanted_bytes"]
    limit_bytes = record["limit_bytes"]
    parts = [f"{name} {format_gb_or_mb(allocated[name])}" for name in allocated if name not in SUMS]
    request_text = f"{format_gb_or_mb(requested_bytes)} requested with" if requested_bytes else "allocated"
    reserved_text = f", {format_gb_or_mb(allocated['reserved'])} reserved" if "reserved" in allocated else ""
    limit_text = f" (limit {format_gb_or_mb(limit_bytes)})" if limit_bytes else ""
    total_text = f"{format_gb_or_mb(allocated['total'])}{' allocated' if requested_bytes else ''}"
    snapshot_text = ""
    if "snapshot" in record:
        snapshot_text = "; for a history of allocations, train with --set metrics.allocation_history=true"
        if record["snapshot"] is not None:
            link = f"open {record['snapshot']} at https://pytorch.org/memory_viz"
            snapshot_text = f"; allocations and the lines that made them: {link}"
    return f"out of memory: {request_text} {total_text}{limit_text}: {', '.join(parts)}{reserved_text}{snapshot_text}"


def describe_kill(directory: Path, rank: int, exit_reason: str, oom_kills: int = 0) -> str:
    """Return why a rank without a failure record exited; `exit_reason` is the signal or exit code, as text.

    The text contains the line of a fatal signal, whether the OOM killer killed the rank, and the last recorded peak
    of its memory. `oom_kills` counts those since the launcher started; other ranks may have recorded some too.
    """
    if "SIGKILL" not in exit_reason:
        fault = describe_fault(directory, rank)
        return f"{exit_reason}: {fault}" if fault else f"{exit_reason} and wrote no failure record"
    if not oom_kills and not any(dump.get("oom_kills") for dump in read_dumps(directory).values()):
        return f"{exit_reason} and wrote no failure record; possible cause: out of memory"
    limit = cgroup_memory_limit()
    limit_text = f" (cgroup limit: {format_gb_or_mb(limit)})" if limit else ""
    peak_text = ""
    # Ranks record their peak about once a second.
    with suppress(OSError):
        for record in read_valid_jsonl(rank_record_file(directory, rank), [], decode_rank_line):
            if "peak_memory_bytes" in record:
                peak = format_gb_or_mb(record["peak_memory_bytes"])
                peak_text = f"; last recorded peak: {peak} by step {record['step']}"
    return f"{exit_reason}, by the kernel's OOM killer{limit_text}{peak_text}"


def _find_cgroup_files(version_2: str, version_1: str) -> Iterator[Path]:
    """Yield the file of this process's cgroup.

    The file is under the path of the cgroup, or at the root in a container that sees only its own cgroup.
    """
    with suppress(OSError):
        for line in PROCESS_CGROUP.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            is_v1 = "memory" in controllers.split(",")
            root, name = (CGROUP_ROOT / "memory", version_1) if is_v1 else (CGROUP_ROOT, version_2)
            for file in (root / path.lstrip("/") / name, root / name):
                if (is_v1 or not controllers) and file.is_file():
                    yield file
                    break

"""Kills by the kernel's OOM killer, recognized by cgroup files and by the records of ranks."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.debug import oom
from phalanx.runs.hang_dumps import describe_fault, fault_file, write_dump
from phalanx.runs.step_records import rank_record_file
from phalanx.spec.parallel_dims import ParallelDims
from tests.helpers.hang_dumps import BUSY, make_dump

MEMORY_EVENTS = "low 0\nhigh 0\nmax 7\noom 3\noom_kill 2\noom_group_kill 0\n"
OOM_CONTROL = "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n"


def fake_cgroup(folder: Path, monkeypatch: pytest.MonkeyPatch, own: str, files: dict[str, str]) -> None:
    """Make these files those of the cgroup of this process."""
    (folder / "cgroup").write_text(own)
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    monkeypatch.setattr(oom, "PROCESS_CGROUP", folder / "cgroup")
    monkeypatch.setattr(oom, "CGROUP_ROOT", folder)


def test_cgroup_oom_kills_and_memory_limit_are_read_from_v2_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"job/memory.events": MEMORY_EVENTS, "job/memory.max": "1048576\n"}
    fake_cgroup(tmp_path, monkeypatch, "0::/job\n", files)
    assert (oom.cgroup_oom_kills(), oom.cgroup_memory_limit()) == (2, 2**20)
    (tmp_path / "job" / "memory.max").write_text("max\n")
    assert oom.cgroup_memory_limit() is None


def test_cgroup_oom_kills_and_memory_limit_are_read_from_v1_files_in_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = "5:cpu:/docker/ab\n4:memory:/docker/ab\n0::/docker/ab\n"
    files = {"memory/memory.oom_control": OOM_CONTROL, "memory/memory.limit_in_bytes": f"{2**63 - 4096}\n"}
    fake_cgroup(tmp_path, monkeypatch, own, files)
    assert (oom.cgroup_oom_kills(), oom.cgroup_memory_limit()) == (5, None)


def test_describe_kill_suspects_oom_when_cgroup_files_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_cgroup(tmp_path, monkeypatch, "0::/\n", {})
    assert (oom.cgroup_oom_kills(), oom.cgroup_memory_limit()) == (None, None)
    assert oom.describe_kill(tmp_path, 1, "was killed by SIGKILL") == (
        "was killed by SIGKILL and wrote no failure record; possible cause: out of memory"
    )
    assert oom.describe_kill(tmp_path, 1, "was killed by SIGKILL", oom_kills=1) == (
        "was killed by SIGKILL, by the kernel's OOM killer"
    )
    assert (
        oom.describe_kill(tmp_path, 1, "was killed by SIGSEGV", oom_kills=1)
        == "was killed by SIGSEGV and wrote no failure record"
    )


def test_describe_kill_reports_source_line_of_segfault(tmp_path: Path) -> None:
    """Python's own faulthandler writes the file."""
    file = fault_file(tmp_path, 1)
    file.parent.mkdir()
    program = f"""
import ctypes, faulthandler, threading
faulthandler.enable(open({str(file)!r}, "w"), all_threads=True)
threading.Thread(target=threading.Event().wait, daemon=True).start()
def harm():
    ctypes.string_at(0)
harm()
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=100)
    assert result.returncode == -signal.SIGSEGV
    description = oom.describe_kill(tmp_path, 1, "was killed by SIGSEGV")
    assert re.fullmatch(
        r"was killed by SIGSEGV: Segmentation fault in .*ctypes/__init__.py:\d+ \(string_at\)", description
    )
    file.write_text("")
    assert describe_fault(tmp_path, 1) is None


def test_describe_kill_reports_last_recorded_memory_peak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cgroup(tmp_path, monkeypatch, "0::/\n", {"memory.max": str(2 * 10**9)})
    dump = make_dump(0, ParallelDims(dp_shard=2), [], BUSY)
    dump["oom_kills"] = 1
    write_dump(tmp_path, dump)
    description = "was killed by SIGKILL, by the kernel's OOM killer (cgroup limit: 2.00 GB)"
    assert oom.describe_kill(tmp_path, 1, "was killed by SIGKILL") == description
    rank_record_file(tmp_path, 1).parent.mkdir()
    step = {"start": 0.0, "seconds": dict.fromkeys(("data", "passes", "reduce", "optimizer"), 0.1), "stages": {}}
    peaks = {1: 10**9, 2: 12 * 10**8}
    lines = [{"format": 1}, *({**step, "step": number, "peak_memory_bytes": peak} for number, peak in peaks.items())]
    rank_record_file(tmp_path, 1).write_text("\n".join(map(json.dumps, lines)) + '\n{"step": 3, "pe')
    description += "; last recorded peak: 1.20 GB by step 2"
    assert oom.describe_kill(tmp_path, 1, "was killed by SIGKILL") == description


def test_format_oom_report_lists_bytes_by_part() -> None:
    held = {"parameters": 10**9, "gradients": 0, "optimizer": 2 * 10**9, "rest": 10**8, "total": 31 * 10**8, "peak": 4}
    report = {"held_bytes": held, "wanted_bytes": 5 * 10**8, "limit_bytes": None}
    assert oom.format_oom_report(report) == (
        "out of memory: 500.0 MB requested with 3.10 GB allocated: "
        "parameters 1.00 GB, gradients 0.0 MB, optimizer 2.00 GB, rest 100.0 MB"
    )
    assert oom.format_oom_report({**report, "wanted_bytes": None}).startswith("out of memory: allocated 3.10 GB: ")
    assert oom.format_oom_report({}) == ""
    recorded = oom.format_oom_report({**report, "snapshot": "runs/a/failures/rank-00000.pickle"})
    assert recorded.endswith("open runs/a/failures/rank-00000.pickle at https://pytorch.org/memory_viz")
    assert oom.format_oom_report({**report, "snapshot": None}).endswith("--set metrics.allocation_history=true")

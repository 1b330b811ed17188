"""The interface of checks to a machine: commands with time limits, recorded and replayed machines, invalid content."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from phalanx.doctor import disk_write_probe, run_checks
from phalanx.doctor.checks import software
from phalanx.doctor.checks.disk import WRITE_SECONDS, check_disk
from phalanx.doctor.error_counters import read_counters
from phalanx.doctor.expectations import Expectations
from phalanx.doctor.expectations_from_run import expectations_from_run
from phalanx.doctor.finding import CheckSkipped, DoctorFinding
from phalanx.doctor.machine import CANNOT_RUN, COMMAND_SECONDS, CommandTimeout, Machine
from phalanx.doctor.node_facts import node_facts
from phalanx.doctor.subprocesses import CommandOutput, run_command
from phalanx.spec.files.load import run_from_table
from tests.helpers import h100_snapshot

CPU_SNAPSHOT = Path(__file__).parent / "cpu_snapshot"


def process_exits(pid: int) -> bool:
    """Return whether a process exits within 10 s."""
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.1)
    return False


def test_run_command_kills_hung_program_and_its_children(tmp_path: Path) -> None:
    """The program ignores SIGTERM, and its child keeps its stdout open."""
    pids = tmp_path / "pids"
    program = f"trap '' TERM; sleep 1000 & echo $$ $! > {pids}; echo started; wait"
    start = time.monotonic()
    output = run_command(["sh", "-c", program], 2)
    assert time.monotonic() - start < 60
    assert (output.text, output.code) == ("started\n", None)
    assert all(process_exits(int(pid)) for pid in pids.read_text().split())


def test_doctor_reports_hung_commands_within_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs on this machine: an nvidia-smi that never returns, a check that hangs on
    an endless file, and faults of the environment."""
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nsleep 1000\n")
    program.chmod(0o755)
    os.mkfifo(tmp_path / "log")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("NCCL_DEBUG_FILE", str(tmp_path / "log"))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    limit = 40  # more than the 10 s of nvidia-smi and the start of all checks while other tests run
    monkeypatch.setattr(run_checks, "CHECK_SECONDS", limit)
    start = time.monotonic()
    findings = run_checks.run_all_checks(Machine(), Expectations(gpus=8, quick=True))
    assert time.monotonic() - start < 60  # the limit of --quick
    wrong = {finding.id: finding for finding in findings if finding.severity in ("FAIL", "WARN")}
    # Other tests may be killed for memory, or fill the disk, at the same time.
    by_others = {"kernel.out_of_memory", "disk.write"}
    assert wrong.keys() - by_others == {"gpu.answers", "doctor.stuck", "nccl.gloo_interface", "nccl.left_over"}
    assert wrong["gpu.answers"].measured == f"no answer in {COMMAND_SECONDS} s"
    assert (wrong["doctor.stuck"].device, wrong["doctor.stuck"].measured) == ("nccl_log", f"no answer in {limit} s")
    of_gloo = wrong["nccl.gloo_interface"]
    assert (of_gloo.device, of_gloo.measured) == ("GLOO_SOCKET_IFNAME", "nosuch0")
    assert all(finding.remedy for finding in wrong.values())
    assert {finding.id for finding in findings if finding.severity == "OK"} >= {"host.shm", "disk.writable"}


def test_check_process_imports_neither_pydantic_nor_torch() -> None:
    """Twenty checks start at once. Half a second of imports in each exceeded the time limit on a busy machine."""
    code = "import sys; import phalanx.doctor.run_checks; print({'pydantic', 'torch'} & set(sys.modules))"
    assert run_command([sys.executable, "-c", code], 60) == CommandOutput("set()\n")


def test_run_command_needs_no_temporary_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk may be full or read-only, which a check should report."""

    def full(*_: object, **__: object) -> None:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    assert run_command(["echo", "here"], 10) == CommandOutput("here\n", 0)


def test_machine_run_distinguishes_unrunnable_from_missing_program(tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_bytes(b"\x7fELF")
    program.chmod(0o755)
    assert Machine().run("broken", str(program)) == CommandOutput(f"{program}: Exec format error", CANNOT_RUN)
    assert Machine().run("none", str(tmp_path / "nothing")) is None


def test_doctor_reports_checks_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: list[str]) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(run_checks, "TimedProcess", refused)
    findings = run_checks.run_all_checks(Machine(), Expectations())
    assert [(finding.id, finding.device) for finding in findings] == [
        ("doctor.unreadable", check) for check in run_checks.CHECKS
    ]


def test_doctor_reports_stuck_disk_check_when_directory_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulates a network file system whose server is gone: every access to it blocks."""
    program = "import os, time\nisdir = os.path.isdir\n"
    program += "os.path.isdir = lambda path: time.sleep(1000) if 'hung' in str(path) else isdir(path)\n"
    (tmp_path / "sitecustomize.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setattr(run_checks, "CHECKS", {"disk": check_disk})
    monkeypatch.setattr(run_checks, "CHECK_SECONDS", 5)
    run = run_from_table({"model": {"preset": "tiny"}, "output_dir": "/hung/runs"})
    findings = run_checks.run_all_checks(Machine(), expectations_from_run(run, 2))
    assert [(finding.id, finding.severity, finding.device) for finding in findings] == [
        ("doctor.stuck", "FAIL", "disk")
    ]


def test_doctor_torch_probe_reports_cuda_initialization_error(capsys: pytest.CaptureFixture[str]) -> None:
    """With error 802 or an old driver, devices are counted without CUDA, which raises at its first use."""

    class Tensor:
        def cuda(self) -> None:
            raise RuntimeError("Error 802: system not yet initialized\nsome stack")

    cuda = SimpleNamespace(device_count=lambda: 8, is_available=lambda: False)
    torch = SimpleNamespace(
        cuda=cuda, zeros=lambda _: Tensor(), __version__="2.7.0", version=SimpleNamespace(cuda="12.8")
    )
    exec(software.PROBE_PROGRAM.replace("import json, torch", "import json"), {"torch": torch})
    probe = json.loads(capsys.readouterr().out)
    assert (probe["gpus"], probe["error"]) == (8, "RuntimeError: Error 802: system not yet initialized")


def test_machine_run_parses_exit_status_of_snapshot_commands(tmp_path: Path) -> None:
    (tmp_path / "commands").mkdir()
    (tmp_path / "commands/one.txt").write_text("what it said\n[exit 7]\n")
    (tmp_path / "commands/two.txt").write_text("[no answer]\n")
    machine = Machine(tmp_path)
    assert machine.run("one", "anything") == CommandOutput("what it said", 7)
    with pytest.raises(CommandTimeout):
        machine.run("two", "anything")
    assert machine.run("three", "anything") is None


def test_machine_snapshot_reproduces_node_report(tmp_path: Path) -> None:
    """The report of this machine's snapshot equals the report of this machine."""
    report = run_checks.examine_node(
        Machine(record=tmp_path / "record"), Expectations(quick=True, directory=str(tmp_path))
    )
    replayed = run_checks.examine_node(Machine(tmp_path / "record"), Expectations(quick=True, directory=str(tmp_path)))
    assert replayed == report
    assert report.facts["kernel"] == os.uname().release
    assert {finding.id for finding in report.findings} >= {"software.torch", "host.shm", "disk.write"}
    assert read_counters(Machine(tmp_path / "record")).keys() == read_counters(Machine()).keys()


def test_machine_snapshot_returns_first_read_of_changing_file(tmp_path: Path) -> None:
    changing = tmp_path / "meminfo"
    changing.write_text("MemAvailable: 1")
    assert Machine(record=tmp_path / "record").read(str(changing)) == "MemAvailable: 1"
    changing.write_text("MemAvailable: 2")
    assert Machine(record=tmp_path / "record").read(str(changing)) == "MemAvailable: 1"
    assert Machine().read(str(changing)) == "MemAvailable: 2"


def test_machine_snapshot_contains_nccl_conf_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("NCCL_CONF_FILE", raising=False)
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    (tmp_path / ".nccl.conf").write_text("NCCL_DEBUG=INFO\nNCCL_IB_TC=106\n")
    environment = Machine(record=tmp_path / "record").environment
    assert (environment["NCCL_DEBUG"], environment["NCCL_IB_TC"]) == ("WARN", "106")
    assert Machine(tmp_path / "record").environment == environment


def test_machine_snapshot_replays_failed_and_hung_commands(tmp_path: Path) -> None:
    machine = Machine(record=tmp_path)
    machine.run("false", sys.executable, "-c", "print('no'); raise SystemExit(3)")
    assert Machine(tmp_path).run("false") == CommandOutput("no", 3)
    with pytest.raises(CommandTimeout):
        machine.run("slow", "sleep", "1000", seconds=0.2)
    with pytest.raises(CommandTimeout):
        Machine(tmp_path).run("slow")


def test_doctor_has_no_findings_on_captured_cpu_node() -> None:
    """The node has two cores, no GPU and no RDMA. Checks without meaning there are skipped with a reason."""
    findings = run_checks.run_all_checks(
        Machine(CPU_SNAPSHOT), Expectations(gpus=0, ranks=2, rank_bytes=2**30, checkpoints_bytes=10**9)
    )
    assert {finding.severity for finding in findings} == {"OK", "SKIP"}
    skipped = {finding.id: finding.measured for finding in findings if finding.severity == "SKIP"}
    assert skipped["gpus"] == skipped["software.cuda"] == "no NVIDIA GPU"
    assert skipped["rdma_ports"] == skipped["host.memlock"] == "no RDMA device"
    assert all(skipped.values())
    assert "memory.headroom" in {finding.id for finding in findings if finding.severity == "OK"}
    # Without `gpus`, a node without GPUs is checked for a run on CPUs.
    anywhere = run_checks.run_all_checks(Machine(CPU_SNAPSHOT), Expectations(ranks=2, rank_bytes=2**50))
    assert "memory.headroom" in {finding.id for finding in anywhere if finding.severity == "FAIL"}


@pytest.mark.parametrize(
    ("path", "old", "new", "rule", "severity", "device"),
    [
        ("commands/df_shm.txt", r"tmpfs .*", "shm 65536 0 65536 0% /dev/shm", "host.shm", "FAIL", "/dev/shm"),
        ("commands/df_runs.txt", r"\d+%", "99%", "disk.very_full", "FAIL", "."),
        ("commands/write.txt", r"in [\d.]+ s", "in 30.1 s", "disk.write", "WARN", "."),
        ("commands/torch.txt", r"(?s).*", "[no answer]", "software.torch", "FAIL", "torch"),
        ("proc/meminfo", r"MemAvailable: +\d+", "MemAvailable: 900000", "memory.available", "WARN", ""),
        ("sys/devices/system/cpu/offline", r"\s*$", "1", "cpu.offline", "WARN", "1"),
        (
            "commands/kernel_log.txt",
            r"$",
            "Out of memory: Killed process 7 (pt_main)",
            "kernel.out_of_memory",
            "WARN",
            "pt_main",
        ),
        ("commands/kernel_log.txt", r"$", "I/O error, dev vda, sector 8", "kernel.disk", "FAIL", "vda"),
    ],
)
def test_doctor_reports_fault_planted_in_captured_cpu_node(
    path: str, old: str, new: str, rule: str, severity: str, device: str, tmp_path: Path
) -> None:
    root = tmp_path / "record"
    shutil.copytree(CPU_SNAPSHOT, root)
    text = (root / path).read_text()
    (root / path).write_text(re.sub(old, new, text, count=1))
    assert (root / path).read_text() != text
    (problem,) = [
        finding
        for finding in run_checks.run_all_checks(Machine(root), Expectations())
        if finding.severity in ("WARN", "FAIL")
    ]
    assert (problem.id, problem.severity, problem.device) == (rule, severity, device)


def test_doctor_fails_gpu_run_on_cpu_node() -> None:
    findings = [
        finding
        for finding in run_checks.run_all_checks(Machine(CPU_SNAPSHOT), Expectations(gpus=8))
        if finding.severity == "FAIL"
    ]
    assert [(finding.id, finding.measured) for finding in findings] == [("gpu.answers", "not installed")]


@pytest.mark.parametrize("corruption", ["", "\x00\ufffd ][,:%\n-1 nan\n", "half"])
def test_doctor_checks_do_not_raise_on_corrupted_files(corruption: str, tmp_path: Path) -> None:
    """Each file of the snapshot is empty, random text or truncated.
    Checks report a finding, skip or ignore the file."""
    h100_snapshot.write_h100_snapshot(tmp_path)
    expected = Expectations(gpus=8, ranks=8, nccl_log="/nccl.log")
    other_devices = re.compile("mlx5_[1-7]|ens[1-7]|0000:[4569cd]")  # the first of each kind is enough
    files = [path for path in sorted(tmp_path.rglob("*")) if path.is_file() and not other_devices.search(str(path))]
    assert len(files) > 80
    for path in files:
        text = path.read_text()
        path.write_text(text[: len(text) // 2] if corruption == "half" else corruption)
        machine = Machine(tmp_path)
        findings = [
            finding
            for check in run_checks.CHECKS.values()
            for finding in _run_check_unguarded(check, machine, expected)
        ]
        assert findings
        node_facts(machine)
        read_counters(machine)
        path.write_text(text)


def _run_check_unguarded(check: run_checks.Check, machine: Machine, expected: Expectations) -> list[DoctorFinding]:
    """Run a check as `run_checks.run_check` does, without its handler of unexpected exceptions."""
    with suppress(CheckSkipped):
        return list(check(machine, expected))
    return []


def test_run_check_reports_exception_as_unreadable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def check_broken(machine: Machine, expected: Expectations) -> list[DoctorFinding]:
        raise ZeroDivisionError("a bug")

    monkeypatch.setitem(run_checks.CHECKS, "broken", check_broken)
    (finding,) = run_checks.run_check("broken", Machine(tmp_path), Expectations())
    assert (finding.id, finding.device, finding.severity) == ("doctor.unreadable", "broken", "WARN")
    assert finding.measured == "ZeroDivisionError: a bug"


def test_disk_write_probe_finishes_in_time_on_slow_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The disk writes 10 MB/s on a simulated clock that advances at
    fsync. 256 MiB would exceed the probe's time limit."""
    clock = [0.0]
    monkeypatch.setattr(
        os, "fsync", lambda _: clock.append(clock[-1] + disk_write_probe.BLOCKS_PER_SYNC * 2**20 / 10e6)
    )
    monkeypatch.setattr(time, "perf_counter", lambda: clock[-1])
    monkeypatch.setattr(sys, "argv", ["write", str(tmp_path), "256"])
    disk_write_probe.main()
    assert clock[-1] < WRITE_SECONDS
    size, seconds = re.match(r"(\d+) bytes in ([\d.]+) s", capsys.readouterr().out).groups()  # type: ignore[union-attr]
    assert float(size) / float(seconds) == pytest.approx(10e6, rel=1e-3)
    assert not list(tmp_path.iterdir())

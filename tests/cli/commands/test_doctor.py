"""`phalanx doctor`: its output, its files and its exit codes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from typer.testing import CliRunner

from phalanx.cli.main import app
from phalanx.doctor.machine import Machine
from phalanx.spec.errors import UserError
from phalanx.spec.topology.read import read_topology
from tests.helpers import cli_runner

doctor_output = partial(cli_runner.command_output, "doctor")
doctor_json = partial(cli_runner.command_json, "doctor")
ROOT = Path(__file__).parents[3]
CPU_SNAPSHOT = ROOT / "tests/doctor/cpu_snapshot"
FINDING_KEYS = {"id", "severity", "host", "device", "measured", "unit", "threshold", "source", "remedy", "command"}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Write a run of llama3-8b with 16 ranks on two nodes like the recorded one."""
    path = tmp_path / "run.toml"
    path.write_text(
        f'output_dir = "{tmp_path}"\n[model]\npreset = "llama3-8b"\n'
        "[training]\nseq_len = 4096\ntokens_per_step = 131072\n"
        '[layout]\ndata_parallel = "zero3"\n[cluster]\npreset = "h100"\nnodes = 2\nnproc_per_node = 8\n'
    )
    return path


@pytest.fixture
def cpu_run(tmp_path: Path) -> Path:
    path = tmp_path / "cpu.toml"
    path.write_text(
        '[model]\npreset = "tiny"\nnum_layers = 2\n'
        '[training]\nseq_len = 64\ntokens_per_step = 1024\nprecision = "fp32"\n'
        '[cluster]\ndevice = "cpu"\n[layout]\ndata_parallel = "zero3"\n'
    )
    return path


def test_doctor_exits_0_for_healthy_node(h100: Path, run: Path) -> None:
    output = doctor_output(run, "--from-snapshot", h100)
    assert re.fullmatch(r"node1: 0 failures, 0 warnings, \d+ passed, \d+ not checked", output.splitlines()[-1])
    assert re.search(r"^passed checks: gpu \d+, ecc 4, ", output, re.MULTILINE)
    report = doctor_json(run, "--from-snapshot", h100)
    assert report["exit_code"] == 0
    assert all(set(finding) == FINDING_KEYS for finding in report["findings"])
    assert {finding["host"] for finding in report["findings"]} == {"node1"}


def test_doctor_prints_failures_first_with_remedy(h100: Path) -> None:
    (h100 / "sys/class/infiniband/mlx5_6/ports/1/rate").write_text("200 Gb/sec (4X HDR)\n")
    (h100 / "sys/class/net/ens3np0/ecn/roce_np/cnp_802p_prio").write_text("3\n")
    lines = doctor_output("--from-snapshot", h100, exit_code=2).splitlines()
    assert lines[0].split()[:2] == ["finding", "device"]
    assert lines[1].startswith("FAIL  rdma.rate")
    assert "mlx5_6" in lines[1]
    assert any(line.startswith("WARN  roce.cnp") for line in lines)
    text = " ".join(" ".join(lines).split())
    assert "mlxlink -d mlx5_6" in text
    assert lines[-1].startswith("node1: 1 failures, 1 warnings")


def test_doctor_lists_findings_below_each_other_in_narrow_terminal(h100: Path) -> None:
    (h100 / "sys/class/infiniband/mlx5_6/ports/1/rate").write_text("200 Gb/sec (4X HDR)\n")
    text = doctor_output("--from-snapshot", h100, exit_code=2, width=80)
    title, measured, threshold, remedy = text.splitlines()[:4]
    assert title.split() == ["FAIL", "rdma.rate", "mlx5_6"]
    assert measured.split()[:2] == ["measured:", "200"]
    assert threshold.strip().startswith("should be: ")
    assert remedy.strip().startswith("what to do: ")


def test_doctor_exits_1_for_warnings_and_3_when_all_checks_are_skipped(h100: Path, tmp_path: Path) -> None:
    (h100 / "proc/sys/kernel/numa_balancing").write_text("1\n")
    assert doctor_json("--from-snapshot", h100, exit_code=1)["exit_code"] == 1
    nothing = tmp_path / "nothing"
    nothing.mkdir()
    assert {finding["severity"] for finding in doctor_json("--from-snapshot", nothing, exit_code=3)["findings"]} == {
        "SKIP"
    }


def test_doctor_fails_when_run_exceeds_gpu_memory_or_node_has_no_gpus(run: Path, h100: Path) -> None:
    """ZeRO-3 does not fit on two GPUs. The captured machine has no GPUs, but the run asks for some."""
    two_nodes = ("--nproc", 1, "--set", "cluster.nodes=2")
    findings = doctor_json(run, "--from-snapshot", h100, *two_nodes, exit_code=2)["findings"]
    assert {finding["id"] for finding in findings if finding["severity"] == "FAIL"} == {"gpu.headroom"}
    findings = doctor_json(run, "--from-snapshot", CPU_SNAPSHOT, exit_code=2)["findings"]
    assert ("gpu.answers", "not installed") in {(finding["id"], finding["measured"]) for finding in findings}


def test_doctor_rejects_missing_nccl_log(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--nccl-log = .* is not a file"):
        doctor_output("--nccl-log", tmp_path / "nolog")


def test_doctor_rejects_invalid_layout_of_run(run: Path, h100: Path) -> None:
    with pytest.raises(UserError, match="does not divide"):
        doctor_output(run, "--from-snapshot", h100, "--set", "layout.tp=3")


def test_doctor_gather_compares_node_reports_and_lists_failing_nodes(run: Path, h100: Path, tmp_path: Path) -> None:
    health = tmp_path / "health"
    for host in ("node1", "node2", "node3"):
        (h100 / "proc/sys/kernel/hostname").write_text(f"{host}\n")
        if host == "node3":
            (h100 / "sys/class/net/ens3np0/mtu").write_text("4200\n")
        cli_runner.command_output(
            "doctor", "--from-snapshot", h100, "--save-report", health, exit_code=2 if host == "node3" else 0
        )
    (health / "failing_nodes.txt").write_text("of mine")
    with pytest.raises(UserError, match=r"contains a failing_nodes\.txt that phalanx did not write"):
        doctor_output(run, "--compare-reports", health)
    assert (health / "failing_nodes.txt").read_text() == "of mine"
    (health / "failing_nodes.txt").unlink()
    output = doctor_output(run, "--compare-reports", health, exit_code=2)
    assert "leave out: --exclude=node3" in output
    assert (health / "failing_nodes.txt").read_text() == "node3\n"
    findings = json.loads((health / "findings.json").read_text())
    wrong = [
        (finding["id"], finding["host"], finding["device"]) for finding in findings if finding["severity"] == "FAIL"
    ]
    assert wrong == [("nodes.drift_breaks", "node3", "RDMA MTU"), ("mtu.same", "node3", "ens3np0")]
    page = (health / "findings.md").read_text()
    assert "| FAIL | mtu.same | node3 | ens3np0 | 4200 bytes | 9000 |" in page
    missing = doctor_json(run, "--compare-reports", health, "--set", "cluster.nodes=4", exit_code=2)["findings"]
    assert missing[0]["id"] == "nodes.missing"


def test_doctor_topology_file_is_accepted_by_placement(h100: Path, run: Path, tmp_path: Path) -> None:
    file = tmp_path / "node.txt"
    for _ in range(2):  # the second call replaces the file of the first
        stderr = cli_runner.command_stderr("doctor", "--from-snapshot", h100, "--topology", file)
    assert f"phalanx placement RUN.toml --topology {file}" in stderr
    node = read_topology(file)
    assert (len(node.gpus), node.nics[0], node.nvlinks[0]) == (8, "mlx5_0", 18)
    facts = cli_runner.command_json("placement", run, "--ranks", 16, "--topology", file)
    assert {nic["nic"] for nic in facts["nics"]} == {f"mlx5_{i}" for i in range(8)}
    with pytest.raises(UserError, match="no NVIDIA GPU"):
        doctor_output("--from-snapshot", CPU_SNAPSHOT, "--topology", file)


def test_doctor_collectives_check_passes_with_two_local_ranks(cpu_run: Path) -> None:
    findings = {finding["id"]: finding for finding in doctor_json(cpu_run, "--collectives", "--nproc", 2)["findings"]}
    assert findings["between.wrong"]["severity"] == "OK"
    assert findings["counters.tcp"]["host"]
    assert findings["between.slow_node"]["measured"] == "one node"


def test_doctor_reports_killed_rank_of_collectives_check_as_finding(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed rank once caused the exit code of warnings, without a finding in the JSON."""

    def killed(_: int, arguments: Sequence[str], report: Callable[[dict[int, ProcessFailure], int], int]) -> int:
        return report({1: ProcessFailure(local_rank=1, pid=4711, exitcode=-9, error_file="")}, 0)

    monkeypatch.setattr("phalanx.doctor.multi_node_benchmark.launch_ranks", killed)
    options = ("--set", "cluster.nodes=1", "--set", "cluster.device=cpu", "--out", tmp_path / "out")
    findings = doctor_json(run, "--collectives", *options, exit_code=2)["findings"]
    (finding,) = findings
    assert (finding["id"], finding["device"], finding["host"]) == ("between.failed", "rank 1", Machine().host)
    assert "SIGKILL" in finding["measured"]
    assert (tmp_path / "out/failing_nodes.txt").read_text() == f"{Machine().host}\n"


def test_doctor_collectives_rejects_invalid_rank_count_nodes_and_layout(cpu_run: Path) -> None:
    for arguments, problem in (
        (["--nproc", "1"], "leaves no peer"),
        (["--nproc", "2", "--set", "cluster.nodes=2"], "torchrun"),
        (["--nproc", "2", "--set", "layout.tp=7"], "layout.tp"),
    ):
        with pytest.raises(UserError, match=problem):
            CliRunner().invoke(app, ["doctor", str(cpu_run), "--collectives", *arguments], catch_exceptions=False)


def test_doctor_nproc_without_run_file_does_not_require_gpus() -> None:
    assert doctor_json("--from-snapshot", CPU_SNAPSHOT, "--nproc", 2)["exit_code"] == 0


def test_doctor_raises_user_error_for_invalid_arguments(run: Path, tmp_path: Path) -> None:
    for arguments, problem in (
        (["--collectives"], "requires a run file"),
        (["--from-snapshot", CPU_SNAPSHOT, "--compare-reports", tmp_path], "cannot be combined"),
        (["--from-snapshot", tmp_path / "nowhere"], "is not a directory"),
        (["--compare-reports", tmp_path], "has no"),
        ([tmp_path / "nothing.toml"], "nothing.toml"),
    ):
        with pytest.raises(UserError, match=problem):
            CliRunner().invoke(app, ["doctor", *map(str, arguments)], catch_exceptions=False)


def test_doctor_does_not_import_torch() -> None:
    """PyTorch is imported by a separate process with a time limit."""
    assert "torch" not in cli_runner.imported_packages("doctor", "--from-snapshot", CPU_SNAPSHOT)

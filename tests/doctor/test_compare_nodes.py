"""Comparison of several nodes: differing facts, clocks, error counters around a benchmark, collectives and pairs."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from phalanx.doctor import compare_nodes, cross_node_bandwidth, error_counters, report, run_checks
from phalanx.doctor.cross_node_bandwidth import LARGE_BYTES, CollectiveResult
from phalanx.doctor.expectations import Expectations
from phalanx.doctor.finding import DoctorFinding
from phalanx.doctor.machine import Machine
from phalanx.doctor.node_facts import NodeReport
from phalanx.doctor.rules import RULES, SECTIONS
from phalanx.runs import hang_dumps
from phalanx.spec.errors import UserError
from tests.helpers import h100_snapshot
from tests.helpers.snapshot_edits import create_file, overwrite_file, set_variable

HOSTS = ("node1", "node2", "node3", "node4")


def filter_problems(findings: list[DoctorFinding]) -> list[DoctorFinding]:
    return [finding for finding in findings if finding.severity in ("WARN", "FAIL")]


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> list[NodeReport]:
    root = tmp_path_factory.mktemp("h100")
    h100_snapshot.write_h100_snapshot(root)
    node_report = run_checks.examine_node(Machine(root), Expectations())
    return [replace(node_report, host=host, clock_offset_seconds=0.01 * number) for number, host in enumerate(HOSTS)]


def with_changed_facts(nodes: list[NodeReport], number: int, **facts: str) -> list[NodeReport]:
    changed = replace(nodes[number], facts=nodes[number].facts | facts)
    return [*nodes[:number], changed, *nodes[number + 1 :]]


def test_node_facts_match_h100_snapshot(nodes: list[NodeReport]) -> None:
    facts = nodes[0].facts
    assert facts["NVIDIA driver"] == "570.124.06"
    assert (facts["NCCL"], facts["PyTorch"], facts["CUDA of PyTorch"]) == ("2.26.2", "2.7.0+cu128", "12.8")
    assert (facts["RDMA firmware"], facts["RDMA MTU"], facts["VBIOS"]) == ("28.42.1000", "9000", "96.00.89.00.01")
    assert (facts["kernel"], facts["GPUs on the bus"], facts["NCCL_IB_TC"]) == ("6.8.0-60-generic", "8", "106")


def test_node_facts_include_nccl_conf_variables(tmp_path: Path) -> None:
    h100_snapshot.write_h100_snapshot(tmp_path)
    create_file("etc/nccl.conf", "NCCL_IB_QPS_PER_CONNECTION=4\nNCCL_IB_TC=0")(tmp_path)
    facts = run_checks.examine_node(Machine(tmp_path), Expectations()).facts
    assert (facts["NCCL_IB_QPS_PER_CONNECTION"], facts["NCCL_IB_TC"]) == ("4", "106")  # the environment has priority


def test_compare_nodes_has_no_findings_for_equal_nodes(nodes: list[NodeReport]) -> None:
    assert filter_problems(compare_nodes.compare_nodes(nodes, 4)) == []


CHANGED_FACTS = {
    "NVIDIA driver": ("550.90.07", "FAIL"),
    "NCCL": ("2.21.5", "FAIL"),
    "PyTorch": ("2.6.0+cu124", "FAIL"),
    "RDMA MTU": ("1500", "FAIL"),
    "GPUs on the bus": ("7", "FAIL"),
    "kernel": ("5.15.0-118-generic", "WARN"),
    "RDMA firmware": ("28.39.1002", "WARN"),
    "VBIOS": ("96.00.74.00.01", "WARN"),
    "NCCL_IB_TC": ("0", "WARN"),
    "memory GiB": ("1008", "WARN"),
}


@pytest.mark.parametrize("name", CHANGED_FACTS)
def test_compare_nodes_reports_node_with_different_fact(name: str, nodes: list[NodeReport]) -> None:
    value, severity = CHANGED_FACTS[name]
    (finding,) = filter_problems(compare_nodes.compare_nodes(with_changed_facts(nodes, 2, **{name: value}), 4))
    assert (finding.severity, finding.host, finding.device, finding.measured) == (severity, "node3", name, value)
    assert finding.threshold == nodes[0].facts[name]
    assert finding.remedy


def test_compare_nodes_reports_node_with_missing_fact(nodes: list[NodeReport]) -> None:
    incomplete = replace(
        nodes[1], facts={name: value for name, value in nodes[1].facts.items() if name != "NCCL_IB_TC"}
    )
    (finding,) = filter_problems(compare_nodes.compare_nodes([nodes[0], incomplete, nodes[2]]))
    assert (finding.host, finding.device, finding.measured) == ("node2", "NCCL_IB_TC", "none")


def test_compare_nodes_blames_no_host_when_two_nodes_differ(nodes: list[NodeReport]) -> None:
    (finding,) = filter_problems(compare_nodes.compare_nodes(with_changed_facts(nodes[:2], 1, NCCL="2.21.5")))
    assert (finding.host, finding.severity) == ("", "FAIL")
    assert finding.measured == "node1: 2.26.2; node2: 2.21.5"


def test_compare_nodes_reports_clock_skew(nodes: list[NodeReport]) -> None:
    late = [*nodes[:3], replace(nodes[3], clock_offset_seconds=-41.0)]
    (finding,) = filter_problems(compare_nodes.compare_nodes(late))
    assert (finding.id, finding.host, finding.measured) == ("nodes.clock", "node4", -41)


def test_compare_nodes_reports_missing_node_report(nodes: list[NodeReport]) -> None:
    (finding,) = filter_problems(compare_nodes.compare_nodes(nodes[:3], 4))
    assert (finding.id, finding.measured, finding.threshold) == ("nodes.missing", 3, "4")


def test_compare_nodes_names_slurm_nodes_without_report(tmp_path: Path) -> None:
    """srun --exclude takes the node names of Slurm."""
    h100_snapshot.write_h100_snapshot(tmp_path)
    set_variable("SLURM_JOB_NODELIST", "node[1-3]")(tmp_path)
    create_file("commands/job_nodes.txt", "\n".join(HOSTS[:3]))(tmp_path)
    node = run_checks.examine_node(Machine(tmp_path), Expectations())
    compare_nodes.write_node_report(tmp_path, node)
    assert compare_nodes.read_node_reports(tmp_path) == [node]
    findings = filter_problems(compare_nodes.compare_nodes([node], 3))
    assert [(finding.id, finding.host) for finding in findings] == [
        ("nodes.missing", "node2"),
        ("nodes.missing", "node3"),
    ]
    assert report.failing_hosts(findings) == ["node2", "node3"]
    assert filter_problems(compare_nodes.compare_nodes([replace(node, host=host) for host in HOSTS[:3]], 3)) == []
    overwrite_file("commands/job_nodes.txt", "[no answer]")(tmp_path)
    assert run_checks.examine_node(Machine(tmp_path), Expectations()).job_nodes == ()


def test_read_node_reports_round_trips_and_rejects_invalid_files(nodes: list[NodeReport], tmp_path: Path) -> None:
    for node in nodes:
        compare_nodes.write_node_report(tmp_path, node)
    assert compare_nodes.read_node_reports(tmp_path) == nodes
    (tmp_path / "bad.node.json").write_text("[]")
    with pytest.raises(UserError, match=r"bad\.node\.json"):
        compare_nodes.read_node_reports(tmp_path)
    with pytest.raises(UserError, match="has no"):
        compare_nodes.read_node_reports(tmp_path / "nowhere")


def test_stale_node_report_fails(nodes: list[NodeReport], tmp_path: Path) -> None:
    files = [compare_nodes.write_node_report(tmp_path, node) for node in nodes]
    assert filter_problems(compare_nodes.stale_report_findings(tmp_path)) == []
    os.utime(files[1], (time.time() - 7200, time.time() - 7200))
    (finding,) = filter_problems(compare_nodes.stale_report_findings(tmp_path))
    assert (finding.id, finding.severity, finding.host, finding.measured) == ("nodes.old", "FAIL", "node2", 120)


def test_storage_clock_offset_is_zero_on_local_disk(tmp_path: Path) -> None:
    """The kernel of this machine sets the timestamps of local files, and may round them to its ticks."""
    assert abs(compare_nodes.storage_clock(tmp_path)) < 1
    assert not list(tmp_path.iterdir())


def test_storage_clock_returns_offset_when_local_clock_is_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 100)
    assert compare_nodes.storage_clock(tmp_path) == pytest.approx(100, abs=1)


# -- counters ----------------------------------------------------------------------------------------------------------


RDMA_PORT_PATH = "sys/class/infiniband/mlx5_2/ports/1"
INCREASED_COUNTERS: dict[str, tuple[str, Callable[[str], str], str, str, str]] = {
    "symbols": (
        f"{RDMA_PORT_PATH}/counters/symbol_error",
        lambda _: "12",
        "counters.link",
        "FAIL",
        "mlx5_2 symbol_error",
    ),
    "a link that went down": (
        f"{RDMA_PORT_PATH}/counters/link_downed",
        lambda _: "1",
        "counters.link",
        "FAIL",
        "mlx5_2 link_downed",
    ),
    "packets out of order": (
        f"{RDMA_PORT_PATH}/hw_counters/out_of_sequence",
        lambda _: "90",
        "counters.resent",
        "WARN",
        "mlx5_2 out_of_sequence",
    ),
    "no answer": (
        f"{RDMA_PORT_PATH}/hw_counters/local_ack_timeout_err",
        lambda _: "3",
        "counters.resent",
        "WARN",
        "mlx5_2 local_ack_timeout_err",
    ),
    "pause frames": (
        "commands/ethtool_ens2np0.txt",
        lambda text: text.replace("rx_prio3_pause: 0", "rx_prio3_pause: 77"),
        "counters.pause",
        "WARN",
        "ens2np0 rx_prio3_pause",
    ),
    "pause frames that this host sent": (
        "commands/ethtool_ens2np0.txt",
        lambda text: text.replace("tx_prio3_pause: 0", "tx_prio3_pause: 9"),
        "counters.pause",
        "WARN",
        "ens2np0 tx_prio3_pause",
    ),
    "drops of a card": (
        "commands/ethtool_ens2np0.txt",
        lambda text: text.replace("phy: 0", "phy: 5"),
        "counters.dropped",
        "WARN",
        "ens2np0 rx_discards_phy",
    ),
    "broken packets": (
        "sys/class/net/ens2np0/statistics/rx_errors",
        lambda _: "4",
        "counters.dropped",
        "WARN",
        "ens2np0 rx_errors",
    ),
    "PCIe": (
        "sys/bus/pci/devices/0000:52:00.0/aer_dev_nonfatal",
        lambda text: text.replace("NONFATAL 0", "NONFATAL 1"),
        "counters.pcie",
        "FAIL",
        "0000:52:00.0",
    ),
    "NVLink": (
        "commands/smi_nvlink_errors.txt",
        lambda text: text.replace("Link 4: Replay Errors: 0", "Link 4: Replay Errors: 2", 1),
        "counters.nvlink",
        "FAIL",
        "GPU0 link 4",
    ),
    "ECC": (
        "commands/smi_uncorrected.txt",
        lambda text: text.replace("\n5, 0", "\n5, 1"),
        "counters.ecc",
        "FAIL",
        "GPU5",
    ),
    "TCP": ("proc/net/snmp", lambda text: text.replace("100000 3", "101000 53"), "counters.tcp", "WARN", "tcp"),
}


@pytest.mark.parametrize("name", INCREASED_COUNTERS)
def test_counter_findings_report_increased_counter(name: str, tmp_path: Path) -> None:
    path, edit, rule, severity, device = INCREASED_COUNTERS[name]
    h100_snapshot.write_h100_snapshot(tmp_path)
    before = error_counters.read_counters(Machine(tmp_path))
    text = (tmp_path / path).read_text()
    (tmp_path / path).write_text(edit(text))
    assert (tmp_path / path).read_text() != text
    after = error_counters.read_counters(Machine(tmp_path))
    (finding,) = filter_problems(error_counters.counter_findings(before, after))
    assert (finding.id, finding.severity, finding.device) == (rule, severity, device)
    assert finding.remedy
    assert filter_problems(error_counters.counter_findings(after, after)) == []  # the counter did not increase


def test_counter_findings_use_ratio_of_ecn_marked_packets(tmp_path: Path) -> None:
    h100_snapshot.write_h100_snapshot(tmp_path)
    before = error_counters.read_counters(Machine(tmp_path))
    (tmp_path / f"{RDMA_PORT_PATH}/counters/port_rcv_packets").write_text("2000000")
    for num_marked, expected in ((900, []), (1100, ["mlx5_2"])):
        (tmp_path / f"{RDMA_PORT_PATH}/hw_counters/np_ecn_marked_roce_packets").write_text(f"{num_marked}\n")
        findings = filter_problems(
            error_counters.counter_findings(before, error_counters.read_counters(Machine(tmp_path)))
        )
        assert [finding.device for finding in findings] == expected


def test_error_counter_fault_table_covers_every_rule(h100: Path) -> None:
    broken = {fault[2] for fault in INCREASED_COUNTERS.values()} | {"counters.ecn"}
    assert {rule.id for rule in SECTIONS["counters"].rules} == broken
    assert set(error_counters.read_counters(Machine(h100))) == broken | {
        error_counters.PACKETS,
        error_counters.SEGMENTS,
    }


def test_counter_findings_use_new_value_when_counter_was_reset(h100: Path) -> None:
    before = error_counters.read_counters(Machine(h100))
    reset = {**before, "counters.link": {"mlx5_0 symbol_error": 2}}
    high = {**before, "counters.link": {"mlx5_0 symbol_error": 50}}
    assert [finding.measured for finding in filter_problems(error_counters.counter_findings(high, reset))] == [2]


def test_counter_findings_skip_counter_without_first_reading(h100: Path) -> None:
    after = error_counters.read_counters(Machine(h100))
    before = {**after, "counters.link": {}}
    findings = {
        finding.id: finding
        for finding in error_counters.counter_findings(before, {**after, "counters.link": {"mlx5_0 symbol_error": 50}})
    }
    assert (findings["counters.link"].severity, findings["counters.link"].measured) == (
        "SKIP",
        "the machine has no such counters",
    )


def test_read_counters_omits_hung_and_missing_counters(tmp_path: Path) -> None:
    h100_snapshot.write_h100_snapshot(tmp_path)
    (tmp_path / "commands/ethtool_ens2np0.txt").write_text("[no answer]\n")
    (tmp_path / "commands/smi_nvlink_errors.txt").write_text("NVML: Not Supported\n[exit 3]\n")
    for path in tmp_path.glob("sys/bus/pci/devices/*/aer_*"):
        path.unlink()
    counters = error_counters.read_counters(Machine(tmp_path))
    assert not {"counters.nvlink", "counters.pcie"} & counters.keys()
    assert counters["counters.ecc"] == {f"GPU{i}": 0 for i in range(8)}
    assert {name.partition(" ")[0] for name in counters["counters.pause"]} == {
        f"ens{i}np0" for i in (0, 1, 3, 4, 5, 6, 7)
    }


# -- collectives and pairs ---------------------------------------------------------------------------------------------


def pair_bandwidths(
    slow_hosts: dict[str, float] | None = None, slow_pairs: dict[tuple[str, str], float] | None = None
) -> Any:
    bandwidths = {(a, b): 50e9 for i, a in enumerate(HOSTS) for b in HOSTS[i + 1 :]}
    for host, share in (slow_hosts or {}).items():
        bandwidths = {pair: speed * share if host in pair else speed for pair, speed in bandwidths.items()}
    return bandwidths | {pair: 50e9 * share for pair, share in (slow_pairs or {}).items()}


def test_check_node_pairs_reports_slow_node() -> None:
    assert filter_problems(cross_node_bandwidth.check_node_pairs(pair_bandwidths())) == []
    (finding,) = filter_problems(cross_node_bandwidth.check_node_pairs(pair_bandwidths({"node3": 0.5})))
    assert (finding.id, finding.severity, finding.host, finding.measured) == ("between.slow_node", "FAIL", "node3", 50)


def test_check_node_pairs_blames_no_node_for_slow_pair() -> None:
    (finding,) = filter_problems(
        cross_node_bandwidth.check_node_pairs(pair_bandwidths(slow_pairs={("node1", "node4"): 0.4}))
    )
    assert (finding.id, finding.device, finding.measured) == ("between.slow_pair", "node1 - node4", 40)
    assert [other_finding.severity for other_finding in cross_node_bandwidth.check_node_pairs({})] == ["SKIP"]
    assert filter_problems(cross_node_bandwidth.check_node_pairs({("a", "b"): 1.0})) == []


def test_check_collectives_compares_busbw_with_link_bandwidth() -> None:
    result = CollectiveResult(
        name="all_reduce among data",
        ranks=16,
        size_bytes=LARGE_BYTES,
        bus_bytes_per_second=330e9,
        link_bytes_per_second=400e9,
        wrong=0,
    )
    assert filter_problems(cross_node_bandwidth.check_collectives([result])) == []
    (slow,) = filter_problems(cross_node_bandwidth.check_collectives([replace(result, bus_bytes_per_second=215e9)]))
    assert (slow.id, slow.measured, slow.threshold) == ("between.busbw", 215, "at least 220")
    (damaged,) = filter_problems(cross_node_bandwidth.check_collectives([replace(result, wrong=3)]))
    assert (damaged.id, damaged.severity, damaged.measured) == ("between.wrong", "FAIL", 3)
    small = replace(result, size_bytes=1024, bus_bytes_per_second=1.0)  # dominated by latency
    assert filter_problems(cross_node_bandwidth.check_collectives([small])) == []


PUBLISHED_BUSBW = {
    "all_reduce, 8 A100": (300e9, 190e9, 218e9, 220e9),
    "all_reduce, 8 H200 with NVLS": (450e9, 348e9, 465e9, 475e9),
    "all_gather": (450e9, 287e9, 341e9, 345e9),
    "reduce_scatter": (450e9, 289e9, 342e9, 346e9),
    "all_to_all": (450e9, 269e9, 333e9, 338e9),
}
"""Link bandwidth, and published bus bandwidth at 64 MiB, 1 GiB and 8 GiB on nodes of 8 GPUs (nccl-tests, from the
fits of sweeps by stas00/ml-engineering and SimuMax)."""


@pytest.mark.parametrize("name", PUBLISHED_BUSBW)
def test_check_collectives_accepts_published_busbw(name: str) -> None:
    links, *bandwidths = PUBLISHED_BUSBW[name]
    for size, speed in zip((LARGE_BYTES, 2**30, 2**33), bandwidths, strict=True):
        result = CollectiveResult(
            name=name, ranks=8, size_bytes=size, bus_bytes_per_second=speed, link_bytes_per_second=links, wrong=0
        )
        assert filter_problems(cross_node_bandwidth.check_collectives([result])) == []
        # At half the published bandwidth there is a finding.
        assert filter_problems(
            cross_node_bandwidth.check_collectives([replace(result, bus_bytes_per_second=speed / 2)])
        )


@pytest.mark.parametrize("nodes", range(2, 10))
def test_round_robin_pairs_contain_every_pair_once(nodes: int) -> None:
    rounds = cross_node_bandwidth.round_robin_pairs(nodes)
    pairs = [pair for matched in rounds for pair in matched]
    assert sorted(pairs) == [(a, b) for a in range(nodes) for b in range(a + 1, nodes)]
    assert all(len({host for pair in matched for host in pair}) == 2 * len(matched) for matched in rounds)
    assert len(rounds) == nodes - 1 + nodes % 2


def test_collective_findings_are_read_from_shared_directory(tmp_path: Path) -> None:
    assert [other.severity for other in compare_nodes.collective_findings(tmp_path)] == ["SKIP"]
    finding = RULES["between.slow_node"].violation("network", 50, host="node3")
    (tmp_path / compare_nodes.COLLECTIVES_FILE).write_text(json.dumps([finding.__dict__]))
    assert filter_problems(compare_nodes.collective_findings(tmp_path)) == [finding]
    (tmp_path / compare_nodes.COLLECTIVES_FILE).write_text("{")
    with pytest.raises(UserError, match="is not a "):
        compare_nodes.collective_findings(tmp_path)


def test_stale_collective_findings_fail(nodes: list[NodeReport], tmp_path: Path) -> None:
    compare_nodes.write_node_report(tmp_path, nodes[0])
    file = tmp_path / compare_nodes.COLLECTIVES_FILE
    file.write_text(json.dumps([RULES["between.wrong"].ok(0).__dict__]))
    assert filter_problems(compare_nodes.collective_findings(tmp_path)) == []
    os.utime(file, (time.time() - 7200, time.time() - 7200))
    (finding,) = compare_nodes.collective_findings(tmp_path)
    assert (finding.id, finding.severity, finding.device, finding.measured) == ("nodes.old", "FAIL", file.name, 120)


PEER_LOSS_ERROR = "DistBackendError: Connection closed by peer [10.0.0.3]:4711"
RANK_FAILURES: dict[str, tuple[dict[int, tuple[str, str, int]], list[tuple[str, str, str]]]] = {
    "one fails, and others lose it": (
        {0: ("node1", PEER_LOSS_ERROR, 1), 1: ("node2", "OutOfMemoryError: CUDA out of memory", 1)},
        [("node2", "rank 1", "OutOfMemoryError: CUDA out of memory")],
    ),
    "one is killed before it says anything": (
        {0: ("node1", PEER_LOSS_ERROR, 1), 1: ("node2", PEER_LOSS_ERROR, 1)},
        [("", "rank 0", PEER_LOSS_ERROR)],
    ),
    "all fail for one reason": (
        dict.fromkeys(range(3), ("node1", "RuntimeError: no", 1)),
        [("node1", "rank 0", "RuntimeError: no")],
    ),
    "the run file cannot be": (
        {rank: (f"node{rank}", "layout.tp = 3 does not divide", 2) for rank in range(2)},
        [("", "rank 0", "layout.tp = 3 does not divide")],
    ),
}
"""Host, reason and code of each rank's failure record, and host, device and reason of the expected finding."""


@pytest.mark.parametrize("name", RANK_FAILURES)
def test_collective_findings_report_failed_ranks(name: str, nodes: list[NodeReport], tmp_path: Path) -> None:
    failures, expected = RANK_FAILURES[name]
    compare_nodes.write_node_report(tmp_path, nodes[0])
    for rank, (host, reason, code) in failures.items():
        record = {"rank": rank, "time": float(rank), "reason": reason, "code": code, "host": host}
        hang_dumps.write_failure(tmp_path, record)
    findings = compare_nodes.collective_findings(tmp_path)
    assert {(finding.id, finding.severity) for finding in findings} == {("between.failed", "FAIL")}
    assert [(finding.host, finding.device, finding.measured) for finding in findings] == expected

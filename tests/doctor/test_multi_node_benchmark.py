"""Ranks check the nodes of a run: on real ranks, and on network namespaces of which one has a slow link."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from phalanx.doctor import multi_node_benchmark
from phalanx.doctor.compare_nodes import COLLECTIVES_FILE
from phalanx.doctor.finding import DoctorFinding
from phalanx.doctor.machine import Machine
from phalanx.runs import hang_dumps
from phalanx.spec.cluster import ClusterSpec
from phalanx.spec.files.load import run_from_table
from phalanx.spec.files.write import to_toml
from phalanx.testing import rank_pool
from phalanx.testing.network_namespaces import NamespacesUnavailable, star_network

RUN = {
    "model": {
        "vocab_size": 96,
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 4,
        "ffn_hidden_size": 64,
        "max_seq_len": 32,
    },
    "training": {"seq_len": 32, "tokens_per_step": 1536, "precision": "fp32"},
    "layout": {"data_parallel": "zero3", "micro_batch_size": 1},
    "cluster": {"device": "cpu"},
}
SLOW_LINK_MBITS, FAST_LINK_MBITS = 100.0, 1000.0
"""Mbit/s of the links of hosts."""


def collective_kind(operation: str, *groups: tuple[int, ...]) -> dict[str, Any]:
    return {"operation": operation, "groups": groups}


def test_expected_bus_bandwidth_matches_hand_computed_limits() -> None:
    """The run has 2 nodes of 4 GPUs, 400 GB/s inside a node, and a NIC of 50 GB/s per GPU."""
    cluster, hosts = ClusterSpec(link_bytes_per_second=400e9, network_bytes_per_second=50e9), ["a"] * 4 + ["b"] * 4
    for arguments, expected in (
        (collective_kind("all_reduce", (0, 1, 2, 3), (4, 5, 6, 7)), 400e9),
        (collective_kind("all_reduce", tuple(range(8))), 200e9),
        (collective_kind("all_gather", (0, 4), (1, 5)), 50e9),
        (collective_kind("all_to_all", tuple(range(8))), 50e9 * 7 / 4),
        (collective_kind("send", tuple(range(8))), 50e9),
    ):
        assert multi_node_benchmark.expected_bus_bandwidth(arguments, hosts, cluster) == pytest.approx(expected)
    assert (
        multi_node_benchmark.expected_bus_bandwidth(collective_kind("all_reduce", (0, 4)), hosts, ClusterSpec()) is None
    )


def _measure_pairs() -> dict[tuple[str, str], float]:
    return multi_node_benchmark.measure_node_pairs(
        ["a", "a", "b", "b"] if dist.get_world_size() == 4 else ["a", "b", "c"], torch.device("cpu")
    )


@pytest.mark.parametrize(("world_size", "expected"), [(4, {("a", "b")}), (3, {("a", "b"), ("a", "c"), ("b", "c")})])
def test_measure_node_pairs_covers_every_pair_of_hosts(world_size: int, expected: set[tuple[str, str]]) -> None:
    measured = rank_pool(world_size).run(_measure_pairs)
    assert all(set(speeds) == expected and all(speed > 0 for speed in speeds.values()) for speeds in measured)


def _check_nodes() -> list[dict[str, Any]]:
    run = run_from_table(json.loads(json.dumps(RUN)))
    return [asdict(finding) for finding in multi_node_benchmark.check_nodes(run, torch.device("cpu"))]


def test_check_nodes_reports_no_failures_on_a_single_node() -> None:
    first, *others = rank_pool(2).run(_check_nodes)
    findings = {finding["id"]: finding for finding in first}
    assert others == [first]
    # Other programs may use the network of this machine, which causes warnings.
    assert {finding["severity"] for finding in first} <= {"OK", "SKIP", "WARN"}
    assert findings["between.wrong"]["severity"] == "OK"
    assert findings["nodes.clock"]["severity"] == "OK"
    assert findings["between.slow_node"]["measured"] == "one node"
    assert findings["counters.tcp"]["host"]


def test_multi_node_benchmark_removes_results_of_earlier_start(tmp_path: Path) -> None:
    """Old results of a rank must not hide that it fails now."""
    (tmp_path / COLLECTIVES_FILE).write_text("[]")
    for rank in (0, 7):
        hang_dumps.write_failure(tmp_path, {"rank": rank, "time": 1.0, "reason": "of yesterday"})
    run = tmp_path / "run.toml"
    run.write_text(to_toml(run_from_table(json.loads(json.dumps(RUN)))))
    # A single rank sends nothing.
    assert multi_node_benchmark.rank_main(argparse.Namespace(run=run, out=tmp_path)) == 2
    assert not (tmp_path / COLLECTIVES_FILE).exists()
    ((rank, record),) = hang_dumps.read_failures(tmp_path).items()
    assert (rank, record["host"]) == (0, Machine().host)
    assert "leaves nothing to send" in record["reason"]


def test_multi_node_benchmark_finds_host_with_slow_link(tmp_path: Path) -> None:
    """Three hosts have their own names and networks. The link of one has a tenth of the bandwidth."""
    run = tmp_path / "run.toml"
    run.write_text(to_toml(run_from_table(json.loads(json.dumps(RUN)))))
    try:
        with star_network(["n1", "n2", "n3"], FAST_LINK_MBITS) as network:
            network.shape("n3", SLOW_LINK_MBITS, SLOW_LINK_MBITS)
            master = network.hosts["n1"].address
            started = []
            for rank, host in enumerate(network.hosts.values()):
                environment = os.environ | {
                    "RANK": str(rank),
                    "WORLD_SIZE": "3",
                    "LOCAL_RANK": "0",
                    "LOCAL_WORLD_SIZE": "1",
                    "MASTER_ADDR": master,
                    "MASTER_PORT": "29611",
                    "GLOO_SOCKET_IFNAME": host.interface,
                    "OMP_NUM_THREADS": "1",
                }
                program = [
                    sys.executable,
                    "-m",
                    "phalanx.doctor.multi_node_benchmark",
                    str(run),
                    "--out",
                    str(tmp_path / "out"),
                ]
                host_program = ["unshare", "--uts", "sh", "-c", f'hostname {host.name}; exec "$@"', "sh", *program]
                started.append(subprocess.Popen([*host.prefix, *host_program], env=environment))
            try:
                assert [process.wait(200) for process in started] == [0, 0, 0]
            finally:
                for process in started:
                    process.kill()
    except NamespacesUnavailable as error:
        pytest.skip(f"no hosts can be made here: {error}")
    findings = [DoctorFinding(**finding) for finding in json.loads((tmp_path / "out" / COLLECTIVES_FILE).read_text())]
    failures = [(finding.id, finding.host) for finding in findings if finding.severity == "FAIL"]
    assert failures == [("between.slow_node", "n3")]
    assert {finding.host for finding in findings if finding.id == "counters.tcp"} == {"n1", "n2", "n3"}

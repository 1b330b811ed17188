"""`phalanx placement`: its output and its pictures."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from xml.etree import ElementTree

import pytest

from phalanx.cost.exact.traffic import traffic_by_role
from phalanx.spec.errors import UserError
from phalanx.spec.files.load import load_run
from phalanx.spec.resolved_run import ResolvedRun
from tests.helpers import cli_runner

placement_output = partial(cli_runner.command_output, "placement")
placement_json = partial(cli_runner.command_json, "placement")
TOPOLOGIES = Path(__file__).parents[2] / "spec" / "topology" / "topologies"
RUN = """
[model]
vocab_size = 96
hidden_size = 32
num_layers = 4
num_heads = 4
num_kv_heads = 4
ffn_hidden_size = 64
max_seq_len = 32
[training]
seq_len = 32
tokens_per_step = 2048
precision = "fp32"
[layout]
micro_batch_size = 1
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(RUN)
    return path


def layout_options(**degrees: object) -> list[str]:
    return [argument for axis, value in degrees.items() for argument in ("--set", f"layout.{axis}={value}")]


def test_placement_prints_node_assignment_bytes_by_link_and_findings(run: Path) -> None:
    output = placement_output(run, "--ranks", "8", "--nproc", "4", *layout_options(tp=2, pp=2))
    lines = output.splitlines()
    assert lines[0] == "model, ddp dp 2, pp 2, tp 2: 8 ranks on 2 nodes of 4"
    assert "  node 0: dp_replicate 0, pp 0-1, tp 0-1" in lines
    assert "  node 1: dp_replicate 1, pp 0-1, tp 0-1" in lines
    assert "assumed: every device has its own NIC, on the rail of its index" in lines
    table = {line.split()[0]: line for line in lines if line[:6].strip() in ("tp", "pp", "dp", "total", "share")}
    assert list(table) == ["tp", "pp", "dp", "total", "share"]
    assert "0.0% cross rails" in output
    assert "good every tp group is inside a fast domain (4 devices)" in lines


def test_placement_bytes_equal_cost_model_traffic(run: Path) -> None:
    """The run has 4 replicas of 2 tensor-parallel ranks on 8 ranks. Only gradients leave a node."""
    facts = placement_json(run, "--ranks", "8", "--nproc", "2", *layout_options(tp=2))
    traffic = traffic_by_role(ResolvedRun(load_run(run, ["layout.tp=2"]), 8))["rank"]
    total = facts["bytes"]["total"]
    assert sum(total.values()) == pytest.approx(8 * sum(row.bytes for row in traffic))
    gradients = sum(row.bytes for row in traffic if "once per update" in row.purpose)
    assert total["rail"] == pytest.approx(8 * gradients)
    assert (total["node"], total["spine"]) == (0, 0)
    assert sum(facts["share_of_all"].values()) == pytest.approx(1)
    assert [nic["sent_bytes"] for nic in facts["nics"]] == [pytest.approx(gradients)] * 8
    assert sum(cell[2] for cell in facts["sent"]["cells"]) == pytest.approx(sum(total.values()))


def test_placement_flags_tp_group_that_leaves_fast_link_domain(run: Path) -> None:
    facts = placement_json(run, "--ranks", "4", "--nproc", "2", *layout_options(tp=4))
    worst = facts["findings"][0]
    assert (worst["verdict"], worst["axis"]) == ("bad", "tp")
    assert "bad  1 of 1 tp groups extend beyond a fast domain (2 devices)" in placement_output(
        run, "--ranks", "4", "--nproc", "2", *layout_options(tp=4)
    )


def test_pxn_moves_all_to_all_traffic_off_the_spine(run: Path) -> None:
    """4 ranks on 2 x 2 exchange tokens for heads. Each sends a third of
    its bytes to the other rail of the other node."""
    exchanged = [
        "--ranks",
        "4",
        "--nproc",
        "2",
        *layout_options(cp=4, cp_method="ulysses"),
        "--set",
        "model.num_kv_heads=4",
    ]
    direct, relayed = (
        placement_json(run, *exchanged)["bytes"]["cp"],
        placement_json(run, *exchanged, "--pxn")["bytes"]["cp"],
    )
    third_bytes = direct["spine"]
    assert direct == pytest.approx({"fast": third_bytes, "node": 0, "rail": third_bytes, "spine": third_bytes})
    assert relayed == pytest.approx({"fast": 2 * third_bytes, "node": 0, "rail": 2 * third_bytes, "spine": 0})


def test_placement_uses_gpus_and_nics_of_topology_file(run: Path) -> None:
    facts = placement_json(run, "--ranks", "16", "--topology", str(TOPOLOGIES / "h100-nv18.txt"), *layout_options(tp=4))
    assert (facts["nproc"], facts["nodes"]) == (8, 2)
    assert facts["site"]["assumed"] == []
    assert facts["numa_nodes"] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert {nic["nic"] for nic in facts["nics"]} == {f"NIC{i}" for i in range(1, 9)}
    slow = placement_json(
        run, "--ranks", "2", "--topology", str(TOPOLOGIES / "rtx4090-pcie.txt"), *layout_options(tp=2)
    )
    assert slow["bytes"]["total"]["fast"] == 0
    assert slow["bytes"]["total"]["node"] > 0
    assert slow["findings"][0]["verdict"] == "bad"


def test_placement_prints_numa_nodes_of_topology_file(run: Path) -> None:
    output = placement_output(run, "--ranks", "8", "--topology", str(TOPOLOGIES / "h100-nv18.txt"))
    assert "NUMA node of device 0, 1, ...: 0, 0, 0, 0, 1, 1, 1, 1" in output


def test_placement_busiest_nic_seconds_equal_bytes_over_bandwidth(run: Path) -> None:
    """The speed is in NCCL's topology file (400 Gb/s for each of 8 GPUs) or in the run file."""
    facts = placement_json(run, "--ranks", "16", "--topology", str(TOPOLOGIES / "h200-nccl.xml"))
    busiest = max(nic["sent_bytes"] for nic in facts["nics"])
    assert facts["busiest_nic_seconds"] == pytest.approx(busiest / 50e9)
    placement = placement_json(run, "--ranks", "4", "--nproc", "2", "--set", "cluster.network_bytes_per_second=1e9")
    assert placement["busiest_nic_seconds"] == pytest.approx(max(nic["sent_bytes"] for nic in placement["nics"]) / 1e9)
    assert placement_json(run, "--ranks", "4", "--nproc", "2")["busiest_nic_seconds"] is None


def test_placement_heatmap_aggregates_ranks_to_nodes_and_node_blocks(run: Path, tmp_path: Path) -> None:
    """With 4 ranks, both tensor-parallel pairs and both rails are drawn, in both directions. 256 ranks
    are drawn as 32 nodes, and 256 nodes as pairs."""
    file = tmp_path / "heat.svg"
    stderr = cli_runner.command_stderr(
        "placement", run, "--ranks", "4", "--nproc", "2", *layout_options(tp=2), "--out", file
    )
    assert stderr == f"wrote {file}\n"
    cells = [mark for mark in ElementTree.parse(file).iter() if mark.get("class") == "cell"]
    assert len(cells) == 8
    facts = placement_json(run, "--ranks", "256", *layout_options(tp=4), "--out", str(file))
    assert facts["sent"]["unit"] == "node"
    cells = [mark for mark in ElementTree.parse(file).iter() if mark.get("class") == "cell"]
    assert len(cells) == len(facts["sent"]["cells"]) == 64  # each block with itself, and with the next one on the ring
    assert placement_json(run, "--ranks", "256", "--nproc", "2", *layout_options(tp=4))["sent"]["unit"] == "node"
    facts = placement_json(run, "--ranks", "256", "--nproc", "1", *layout_options(tp=4))
    assert facts["sent"]["unit"] == "block of 2 nodes"
    assert max(cell[0] for cell in facts["sent"]["cells"]) == 127


def test_placement_assigns_parameter_servers_to_nodes(run: Path) -> None:
    facts = placement_json(
        run, "--ranks", "5", "--nproc", "5", *layout_options(data_parallel="parameter_server", num_servers=2)
    )
    assert facts["ranks_by_node"] == ["2 servers, dp_replicate 0-2"]
    assert set(facts["bytes"]) == {"servers", "total"}


def test_placement_ranks_per_node_follow_option_then_run_file_then_default(run: Path) -> None:
    """The default is 8; without --ranks, all nodes are full."""
    two_per_node = ["--set", "cluster.nproc_per_node=2", "--set", "cluster.nodes=3"]
    for arguments, expected in (
        (two_per_node, (6, 2, 3)),
        ([*two_per_node, "--nproc", "3"], (9, 3, 3)),
        (["--ranks", "16"], (16, 8, 2)),
        ([], (8, 8, 1)),
    ):
        facts = placement_json(run, *arguments)
        assert (facts["ranks"], facts["nproc"], facts["nodes"]) == expected


def test_placement_reports_no_network_traffic_within_one_node(run: Path) -> None:
    assert "the run has no communication" in placement_output(run, "--ranks", "1")
    assert "there is no traffic between nodes" in placement_output(run, "--ranks", "2")


def test_placement_raises_user_error_for_invalid_arguments(run: Path, tmp_path: Path) -> None:
    topology = tmp_path / "topo.txt"
    topology.write_text("nothing of the kind")
    for arguments, problem in (
        (["--ranks", "6", *layout_options(tp=4)], "does not divide the 6 ranks"),
        (["--topology", str(topology)], "has no header line"),
        (["--topology", str(TOPOLOGIES / "h100-nv18.txt"), "--nproc", "16"], "exceeds the 8 GPUs"),
        (["--out", "heat.gif"], "has an unknown suffix"),
    ):
        with pytest.raises(UserError, match=problem):
            placement_output(run, *arguments)


def test_placement_replaces_only_pictures_of_its_own(run: Path, tmp_path: Path) -> None:
    notes, picture = tmp_path / "notes.html", str(tmp_path / "heat.html")
    notes.write_text("my notes")
    with pytest.raises(UserError, match="was not written by phalanx"):
        placement_output(run, "--ranks", "4", "--out", str(notes))
    assert notes.read_text() == "my notes"
    for _ in range(2):
        placement_output(run, "--ranks", "4", "--out", picture)


def test_placement_does_not_import_torch(run: Path) -> None:
    assert "torch" not in cli_runner.imported_packages("placement", run, "--ranks", 8)


def test_placement_shows_collectives_over_all_ranks_of_gpus(run: Path) -> None:
    output = placement_output(run, "--ranks", "16", "--set", "cluster.preset=h100")
    row = next(line for line in output.splitlines() if line.startswith("all-reduce, hierarchical"))
    assert row.split()[2:] == ["125", "MB", "1.75", "GB", "0.0%", "2.50", "ms"]
    assert "  tree: LL 25.2 µs, LL128 48.5 µs, Simple 92.4 µs" in output
    assert "NCCL" not in placement_output(run, "--ranks", "16", "--set", "cluster.device=cpu")

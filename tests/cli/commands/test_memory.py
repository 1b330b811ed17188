from functools import partial
from math import ceil, exp
from pathlib import Path
from typing import Any

import pytest

from phalanx.cost.estimate.constants import memory_constants
from phalanx.cost.exact.cuda_process import CONTEXT_BYTES
from phalanx.cost.exact.rank_memory import rank_memory
from phalanx.plan.search.oom_risk import MAX_OOM_PROBABILITY, SAFE_OOM_PROBABILITY
from phalanx.spec.errors import UserError
from phalanx.spec.files.load import load_run
from phalanx.spec.resolved_run import ResolvedRun
from tests.helpers import cli_runner

memory_output = partial(cli_runner.command_output, "memory", width=80)
memory_json = partial(cli_runner.command_json, "memory")
COLUMNS = ("parameters", "gradients", "optimizer", "activations", "communication", "total")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text('[layout]\ndata_parallel = "zero2"\n')
    return path


def rows_by_strategy_and_role(run: Path, *arguments: str) -> dict[str, dict[str, Any]]:
    return {f"{row['data']} {row['role']}": row for row in memory_json(run, *arguments)["layouts"]}


def test_memory_lists_all_strategies_and_marks_configured_one(run):
    text = memory_output(run, "--ranks", "4", "--all")
    lines = text.splitlines()
    assert lines[0].startswith("tiny  3 layers")
    assert lines[1].startswith("4 ranks (--ranks), bf16, adamw, sequences of 256 tokens")
    assert all(column in text for column in COLUMNS)
    assert "offloaded" not in text
    names = [line.split("  ")[0] if line[0] == "*" else line[2:].split("  ")[0] for line in lines[4:11]]
    assert names == [
        "ddp",
        "zero1",
        "* zero2",
        "zero3",
        "hsdp of 2",
        "parameter_server server",
        "parameter_server worker",
    ]
    assert "exact: parameters" in text
    assert "estimated: peak activations" in text
    assert "…" not in text


def test_memory_shows_only_fullest_rank_of_each_strategy_without_all(run):
    pipeline = ["--ranks", "4", "--set", "layout.pp=2", "--set", "layout.micro_batch_size=1"]
    first, last = "zero2 pp0", "zero2 pp1"
    assert first in memory_output(run, *pipeline)
    assert last not in memory_output(run, *pipeline)
    assert last in memory_output(run, *pipeline, "--all")
    servers = memory_output(run, "--ranks", "4")
    assert "parameter_server worker" in servers
    assert "parameter_server server" not in servers


def test_memory_json_equals_rank_memory(run):
    rows = rows_by_strategy_and_role(run, "--ranks", "4")
    predicted = rank_memory(ResolvedRun(load_run(run, environment={}), 4))["rank"]
    row = rows["zero2 rank"]
    assert row["own"]
    assert not rows["ddp rank"]["own"]
    assert row["micro_batch"] == 16
    assert {part: row["memory"][part] for part in COLUMNS} == {part: getattr(predicted, part) for part in COLUMNS}
    assert rows["parameter_server worker"]["memory"]["optimizer"] == 0
    facts = memory_json(run, "--ranks", "4")
    assert (facts["model"], facts["ranks"], facts["precision"]) == ("tiny", 4, "bf16")


def test_memory_uses_cluster_rank_count_unless_ranks_option_is_given(run):
    assert memory_json(run)["ranks"] == 8  # as in phalanx plan
    assert "8 ranks (8 per node, because cluster.nproc_per_node is not set" in memory_output(run)
    assert memory_json(run, "--set", "cluster.cores=4", "--set", "cluster.nodes=2")["ranks"] == 8
    cluster = ["--set", "cluster.nproc_per_node=4", "--set", "cluster.nodes=2"]
    assert memory_json(run, *cluster)["ranks"] == 8
    assert "8 ranks (cluster.nproc_per_node x cluster.nodes)" in memory_output(run, *cluster)
    assert memory_json(run, *cluster, "--ranks", "2")["ranks"] == 2


@pytest.mark.parametrize(("nodes", "ranks", "ranks_per_node"), [(1, 4, 4), (2, 8, 4), (2, 7, 4), (4, 4, 1)])
def test_memory_of_cpu_node_is_shared_by_its_own_ranks_only(run, nodes, ranks, ranks_per_node):
    node = ["--set", "cluster.cores=4", "--set", "cluster.memory_bytes=48e9"]
    facts = memory_json(run, "--ranks", ranks, "--set", f"cluster.nodes={nodes}", *node)
    assert facts["memory_bytes"] == 48e9 / ranks_per_node


def test_memory_prints_single_process_row_for_one_rank(run):
    text = memory_output(run, "--ranks", "1")
    assert "one process" in text
    assert "micro-batch 64 x 256 tokens" in text
    assert "hsdp" not in text


def test_memory_hsdp_row_uses_dp_shard_of_run_or_defaults_to_two_replicas(run):
    eight, four = (
        rows_by_strategy_and_role(run, "--ranks", ranks)["hsdp rank"]["memory"]["parameters"] for ranks in ("8", "4")
    )
    assert eight < four
    options = ["--set", "layout.data_parallel=hsdp", "--set", "layout.dp_shard=2", "--ranks", "8"]
    assert rows_by_strategy_and_role(run, *options)["hsdp rank"]["memory"]["parameters"] == four


def test_memory_reports_why_strategy_cannot_run(run):
    rows = rows_by_strategy_and_role(run, "--ranks", "5")
    assert rows["zero2 rank"]["memory"] is None
    assert "which 5 data-parallel ranks cannot divide" in rows["zero2 rank"]["problem"]
    assert rows["zero1 rank"]["problem"] == ""
    assert "* zero2: training.tokens_per_step = 16384 is 64 sequences" in memory_output(run, "--ranks", "5")
    split = ["--ranks", "4", "--set", "layout.tp=2"]
    assert "* zero2: layout.tp = 2 does not divide model.num_heads (3)" in memory_output(run, *split)
    assert (
        rows_by_strategy_and_role(run, *split, "--set", "layout.tp_attention=gathered")["zero2 rank"]["memory"][
            "activations"
        ]
        > 0
    )


def test_memory_reports_why_another_strategy_cannot_have_an_option_of_the_run(run):
    rows = rows_by_strategy_and_role(run, "--ranks", "4", "--set", "training.replica_check_interval=10")
    assert "replica_check_interval" in rows["parameter_server rank"]["problem"]
    assert rows["ddp rank"]["problem"] == ""


def test_memory_prints_one_row_per_pipeline_stage(run):
    stages = ["--ranks", "4", "--set", "layout.pp=2", "--set", "layout.micro_batch_size=1"]
    rows = rows_by_strategy_and_role(run, *stages)
    first, last = (rows[f"zero2 pp{stage}"]["memory"]["activations"] for stage in (0, 1))
    assert first > last > 0, "1F1B holds more micro-batches on its first rank"
    assert "4 ranks (--ranks), pp 2" in memory_output(run, *stages)


def test_memory_marks_layouts_that_do_not_fit_except_parameter_servers(run):
    rows = rows_by_strategy_and_role(run, "--ranks", "4")
    assert rows["ddp rank"]["fits"] is None
    total, libraries = rows["hsdp rank"]["memory"]["total"], 0  # planned for CPUs, which have no CUDA context
    small = ["--ranks", "4", "--set", f"cluster.memory_bytes={ceil(min_safe_memory_bytes(total, libraries))}"]
    rows = rows_by_strategy_and_role(run, *small)
    assert (rows["ddp rank"]["fits"], rows["hsdp rank"]["fits"]) == (False, True)
    assert rows["parameter_server server"]["fits"] is None
    marked_lines = [line for line in memory_output(run, *small).splitlines() if " not fit" in line and ":" not in line]
    assert [line.split()[0] for line in marked_lines] == ["ddp", "parameter_server"]


def min_safe_memory_bytes(held_bytes: int, context_bytes: float) -> float:
    """Return the memory of a device on which this many bytes almost certainly fit, including the driver's context."""
    return (held_bytes + context_bytes) / exp(-1.645 * memory_constants().spread)


def test_memory_says_may_not_fit_as_advise_oom_between_the_thresholds_of_the_planner(run):
    machine = ["--machine", "h100"]
    device_bytes = rows_by_strategy_and_role(run, *machine, "--ranks", "2")["zero2 rank"]["memory"]["device"]
    tight = [
        *machine,
        "--set",
        f"cluster.memory_bytes={round(0.99 * min_safe_memory_bytes(device_bytes, CONTEXT_BYTES))}",
    ]
    p_oom = rows_by_strategy_and_role(run, *tight, "--ranks", "2")["zero2 rank"]["p_oom"]
    assert SAFE_OOM_PROBABILITY <= p_oom < MAX_OOM_PROBABILITY
    verdict = f"may not fit (P(OOM) {p_oom:.0%})"
    own_line = next(line for line in memory_output(run, *tight, "--ranks", "2").splitlines() if line.startswith("*"))
    assert own_line.endswith(verdict)
    assert cli_runner.command_output("advise", "oom", run, *tight, "--nproc", "2").splitlines()[0].endswith(verdict)


@pytest.mark.parametrize("machine", ["h100", "cpu"])
def test_memory_fits_verdict_matches_advise_oom(run, machine):
    """Two ranks on a CPU share its memory."""
    machine_options = ["--machine", machine, *(["--set", "cluster.cores=2"] if machine == "cpu" else [])]
    device_bytes = rows_by_strategy_and_role(run, *machine_options, "--ranks", "2")["zero2 rank"]["memory"]["device"]
    enough = (
        min_safe_memory_bytes(device_bytes, CONTEXT_BYTES)
        if machine == "h100"
        else 2 * min_safe_memory_bytes(device_bytes, 0)
    )
    for factor, fits in ((1.001, True), (0.98, False)):
        memory = ["--set", f"cluster.memory_bytes={round(factor * enough)}"]
        assert rows_by_strategy_and_role(run, *machine_options, *memory, "--ranks", "2")["zero2 rank"]["fits"] is fits
        assert (
            cli_runner.command_json("advise", "oom", run, *machine_options, *memory, "--nproc", "2")["now"]["fits"]
            is fits
        )


def test_memory_prints_offloaded_column_when_offload_is_set(run):
    offload = ["--ranks", "4", "--set", "layout.offload=nvme", "--set", "layout.offload_directory=/tmp"]
    assert "offloaded" in memory_output(run, *offload)
    rows = rows_by_strategy_and_role(run, *offload)
    assert rows["ddp rank"]["memory"]["offloaded"] == 0 < rows["zero1 rank"]["memory"]["offloaded"]
    assert rows["zero3 rank"]["memory"]["parameters"] == 0


def test_memory_describes_limit_of_a_rank_and_cpu_memory_of_a_node(run):
    limit = "limit: a rank can use "
    assert limit not in memory_output(run, "--ranks", "4")
    machine = ["--machine", "h100", "--set", "cluster.nproc_per_node=4"]
    text = memory_output(run, *machine)
    assert limit in text
    assert "GiB for the CUDA context" in text
    zero1 = [*machine, "--set", "layout.data_parallel=zero1"]
    for options, is_offloaded in ((zero1, False), ([*zero1, "--set", "layout.offload=cpu"], True)):
        memory = rows_by_strategy_and_role(run, *options)["zero1 rank"]["memory"]
        assert (memory["offloaded"] > 0) == is_offloaded
        needed_memory = f"{4 * (memory['offloaded'] + memory['checkpoint_copy']) / 2**30:.1f} GiB"
        assert f"CPU memory: a node of 4 ranks needs up to {needed_memory} for checkpoint" in memory_output(
            run, *options
        )


def test_memory_drops_strategy_specific_options_for_other_strategies(run):
    choices = ["--set", "layout.data_parallel=parameter_server", "--set", "layout.max_staleness=1", "--ranks", "4"]
    assert all(not row["problem"] for row in rows_by_strategy_and_role(run, *choices).values())


def test_memory_rejects_missing_run_file(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        memory_output(tmp_path / "none.toml")


def test_memory_does_not_import_torch(run):
    assert "torch" not in cli_runner.imported_packages("memory", run, "--ranks", 4)

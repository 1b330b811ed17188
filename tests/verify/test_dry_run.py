"""Dry runs: the traffic and memory of a traced rank equal those of the real rank and of the plan."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from phalanx.spec.errors import UserError
from phalanx.spec.resolved_run import ResolvedRun
from phalanx.spec.run import RunSpec
from phalanx.testing import rank_pool
from phalanx.verify.dry_run import Traced, TraceError, corner_ranks, trace_ranks
from phalanx.verify.plan_comparison import MEMORY_TOLERANCE, SMALL_TOLERANCE, compare_with_plan
from tests.helpers import cli_runner
from tests.helpers.dry_run_cases import (
    BF16,
    DENSE,
    FEW_EXPERTS,
    FEW_HEADS,
    INDEXERS,
    KINDS,
    LAYOUTS,
    MOE,
    SHARED_KEYS,
    SIDE_BY_SIDE,
    TIED,
    UNEQUAL,
    WINDOWS,
    Table,
    dry_run_case,
)
from tests.helpers.small_runs import measure_steady_step, small_run


def _case_id(value: object) -> str:
    if not isinstance(value, dict):
        return str(value)
    models = (
        ("moe", MOE),
        ("few-experts", FEW_EXPERTS),
        ("tied", TIED),
        ("few-heads", FEW_HEADS),
        ("windows", WINDOWS),
        ("indexers", INDEXERS),
        ("kinds", KINDS),
        ("unequal", UNEQUAL),
        ("side-by-side", SIDE_BY_SIDE),
        ("shared-keys", SHARED_KEYS),
        ("tied-shared-keys", {**SHARED_KEYS, "tie_embeddings": True}),
    )
    model = [
        name
        for name, model_table in models
        if value["model"] == {**model_table, "num_layers": value["model"]["num_layers"]}
    ]
    layout = [
        f"{key[7:]}={setting}" for key, setting in value.items() if key.startswith("layout.") and "micro" not in key
    ]
    precision = ["bf16"] if value["training.precision"] == "bf16" else []
    optimizer = [value["optimizer.name"]] if "optimizer.name" in value else []
    tuning = [name for name, key in (("frozen", "training.freeze"), ("adapter", "adapter.rank")) if key in value]
    return "-".join([*model, *layout, *precision, *optimizer, *tuning])


def traffic_by_operation(rows: list[Table]) -> dict[tuple[str, str, tuple[int, ...]], tuple[int, int]]:
    """Return calls and bytes by operation, purpose and group."""
    return {(r["operation"], r["executed_as"], tuple(r["group"])): (r["calls"], r["bytes"]) for r in rows}


@pytest.mark.parametrize(("world_size", "changes"), LAYOUTS, ids=lambda value: _case_id(value) if value else "")
def test_dry_run_traffic_and_memory_match_real_ranks_and_plan(
    world_size: int, changes: Table, text: Path, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    """Collectives of traced and real ranks, and collectives and state of traced ranks and the plan, are equal
    on every rank; peaks of memory are within 5 %.

    Experts are not balanced in the first steps of a real run: with expert parallelism, sums over ranks are compared.
    With four or more ranks and no expert parallelism, only corner ranks are traced, and in `make test` only the last
    rank, whose shards have the remainders, unless ranks have other stages."""
    run = small_run(text, tmp_path, changes)
    balanced = run.layout.ep == 1
    ranks = corner_ranks(ResolvedRun(run, world_size)) if world_size >= 4 and balanced else range(world_size)
    if balanced and run.layout.pp == 1 and not pytestconfig.getoption("all"):
        ranks = [world_size - 1]
    traced = list(trace_ranks(ResolvedRun(run, world_size), ranks))
    real = rank_pool(world_size).run(measure_steady_step, run) if world_size > 1 else [measure_steady_step(run)]
    for trace in traced:
        measured = real[trace["rank"]]
        if balanced:
            assert traffic_by_operation(trace["collectives"]) == traffic_by_operation(measured["collectives"]), trace[
                "rank"
            ]
            assert _peak_bytes(trace) == pytest.approx(_peak_bytes(measured), rel=MEMORY_TOLERANCE), trace["rank"]
        assert [line for line in compare_with_plan(ResolvedRun(run, world_size), trace) if not line.agrees] == [], (
            trace["rank"]
        )
    if not balanced:
        assert _total_traffic(traced) == _total_traffic(real)
        # Recomputed blocks peak in an expert's backward pass, with the rows of real, unbalanced choices: 3.3 % more.
        assert sum(map(_peak_bytes, traced)) == pytest.approx(sum(map(_peak_bytes, real)), rel=SMALL_TOLERANCE)


TRACED_IN_BF16 = (
    dry_run_case(4, FEW_HEADS, tp=4, data_parallel="zero1", **BF16),
    dry_run_case(4, MOE, ep=4, data_parallel="zero1", **BF16),
    dry_run_case(4, pp=2, tp=2, schedule="zb-h1", **BF16),
    dry_run_case(4, TIED, pp=4, data_parallel="ddp", **BF16),
)
"""Layouts in bf16, compared with the plan only: real ranks compute bf16 very slowly without AVX-512."""


@pytest.mark.parametrize(("world_size", "changes"), TRACED_IN_BF16, ids=lambda value: _case_id(value) if value else "")
def test_dry_run_in_bf16_sends_what_plan_says(world_size: int, changes: Table, text: Path, tmp_path: Path) -> None:
    run = small_run(text, tmp_path, changes)
    (traced,) = trace_ranks(ResolvedRun(run, world_size), [world_size - 1])
    lines = [line for line in compare_with_plan(ResolvedRun(run, world_size), traced) if line.kind == "collective"]
    assert lines
    assert [line for line in lines if not line.agrees] == []


EXACT_PEAKS = {
    "zero1-of-few-experts": (4, FEW_EXPERTS, {"data_parallel": "zero1"}, 0.01),
    "zero3-of-few-experts": (4, FEW_EXPERTS, {"data_parallel": "zero3"}, 0.005),
    "zero3-of-few-experts-bf16": (4, FEW_EXPERTS, {"data_parallel": "zero3", **BF16}, 0.005),
    "zero3-pipeline-of-few-experts": (8, FEW_EXPERTS, {"data_parallel": "zero3", "pp": 2}, 0.005),
    "zero3-pipeline": (8, DENSE, {"data_parallel": "zero3", "pp": 2}, 0.005),
}
"""Layouts with few tokens per rank: memory peaks where buffers and gradients are, which are counted exactly."""


@pytest.mark.parametrize("name", EXACT_PEAKS)
def test_peak_of_few_tokens_is_planned_exactly(name: str, text: Path, tmp_path: Path) -> None:
    world_size, model, layout, tolerance = EXACT_PEAKS[name]
    replicas = world_size // layout.get("pp", 1)
    wide = {**model, "hidden_size": 256, "num_layers": 4, "vocab_size": 64}
    changes = {"training.seq_len": 16, "training.tokens_per_step": 64 * replicas, "layout.micro_batch_size": 1}
    run = small_run(text, tmp_path, {**dry_run_case(world_size, wide, **layout)[1], "model": wide, **changes})
    (traced,) = trace_ranks(ResolvedRun(run, world_size), [0])
    (peak,) = [line for line in compare_with_plan(ResolvedRun(run, world_size), traced) if line.quantity == "total"]
    assert peak.traced == pytest.approx(peak.planned, rel=tolerance)


def _peak_bytes(measured: Table) -> int:
    return int(measured["peak_bytes"]["total"])


def _total_traffic(measured: list[Table]) -> dict[tuple[str, int], tuple[int, int]]:
    total: Counter[tuple[str, int, str]] = Counter()
    for rank in measured:
        for (operation, _, group), (calls, size) in traffic_by_operation(rank["collectives"]).items():
            total[operation, len(group), "calls"] += calls
            total[operation, len(group), "bytes"] += size
    return {key[:2]: (total[(*key[:2], "calls")], total[(*key[:2], "bytes")]) for key in total}


@pytest.fixture(scope="module")
def traced_rank(text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunSpec, Traced]:
    """Return a run of two tensor-parallel ranks, and its first traced rank."""
    run = small_run(
        text, tmp_path_factory.mktemp("traced"), dry_run_case(4, tp=2, data_parallel="zero1", bucket_mb=0.2)[1]
    )
    return run, next(trace_ranks(ResolvedRun(run, 4), [0]))


MISMATCHED_PLANS: dict[str, tuple[Table, set[tuple[str, str]]]] = {
    "buckets": ({"layout": {"bucket_mb": 25.0}}, {("collective", "reduce_scatter"), ("collective", "all_gather")}),
    "norms": ({"model": {"norm": "layernorm"}}, {("collective", "reduce_scatter"), ("memory", "parameters")}),
    "batches": ({"training": {"tokens_per_step": 4096}}, {("collective", "all_gather"), ("flops", "step")}),
}


@pytest.mark.parametrize("mismatch", MISMATCHED_PLANS)
def test_compare_with_plan_detects_plan_of_different_run(mismatch: str, traced_rank: tuple[RunSpec, Traced]) -> None:
    run, trace = traced_rank
    assert all(line.agrees for line in compare_with_plan(ResolvedRun(run, 4), trace))
    changes, expected = MISMATCHED_PLANS[mismatch]
    other_run = run.model_copy(
        update={section: getattr(run, section).replace(**fields) for section, fields in changes.items()}
    )
    mismatches = {
        (line.kind, line.quantity) for line in compare_with_plan(ResolvedRun(other_run, 4), trace) if not line.agrees
    }
    assert expected <= mismatches


def test_corner_ranks_are_first_and_last_of_every_mesh_axis(text: Path, tmp_path: Path) -> None:
    """Compared for 2 replicas x 2 stages x 2 tensor-parallel ranks, two servers and
    three workers, and two expert-parallel ranks."""
    run = small_run(text, tmp_path, dry_run_case(8, pp=2, tp=2)[1])
    assert corner_ranks(ResolvedRun(run, 8)) == [0, 1, 2, 4, 7]
    assert corner_ranks(
        ResolvedRun(small_run(text, tmp_path, dry_run_case(5, data_parallel="parameter_server", num_servers=2)[1]), 5)
    ) == [
        0,
        1,
        2,
        4,
    ]
    assert corner_ranks(ResolvedRun(small_run(text, tmp_path, dry_run_case(8, MOE, ep=2)[1]), 8)) == [0, 1, 7]


def test_dry_run_rejects_asynchronous_parameter_server(text: Path, tmp_path: Path) -> None:
    run = small_run(text, tmp_path, {"layout.data_parallel": "parameter_server", "layout.max_staleness": 1})
    with pytest.raises(UserError, match=r"layout\.max_staleness = 1 makes the traffic differ from step to step"):
        next(trace_ranks(ResolvedRun(run, 2), [0]))


def test_dry_run_with_nvme_offload_writes_no_files(text: Path, tmp_path: Path) -> None:
    directory = tmp_path / "files"
    directory.mkdir()
    run = small_run(
        text, tmp_path, dry_run_case(2, data_parallel="zero1", offload="nvme", offload_directory=str(directory))[1]
    )
    trace = next(trace_ranks(ResolvedRun(run, 2), [0]))
    assert all(line.agrees for line in compare_with_plan(ResolvedRun(run, 2), trace))
    assert list(directory.iterdir()) == []


def test_dry_run_trace_error_contains_rank_and_traceback(text: Path, tmp_path: Path) -> None:
    run = small_run(text, tmp_path, {})
    broken = run.model_copy(update={"model": run.model.model_copy(update={"ffn_hidden_size": -1})})
    with pytest.raises(TraceError, match=r"rank 0:\n(.|\n)*Traceback"):
        next(trace_ranks(ResolvedRun(broken, 2), [0]))


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    model = "\n".join(f"{key} = {json.dumps(value)}" for key, value in DENSE.items())
    path.write_text(f"[model]\n{model}\n[training]\nseq_len = 128\ntokens_per_step = 1024\n[layout]\ntp = 2\n")
    return path


def test_dryrun_command_reports_agreement_of_trace_and_plan(run_file: Path) -> None:
    output = cli_runner.command_output("dryrun", run_file, "--ranks", 2)
    assert "plan and program agree on all 2 traced ranks of 2" in output
    facts = cli_runner.command_json("dryrun", run_file, "--ranks", 4, "--trace", "3,0")
    assert [rank["rank"] for rank in facts["ranks"]] == [0, 3]
    assert facts["agrees"]
    assert facts["ranks"][1]["place"] == {"dp_replicate": 1, "tp": 1}
    lines = {(line["quantity"], line["among"]): line for line in facts["ranks"][0]["lines"]}
    assert lines["all_gather", "tp"]["traced"] == lines["all_gather", "tp"]["planned"] > 0


def test_dryrun_command_exits_1_when_trace_differs_from_plan(run_file: Path) -> None:
    """Tensor-parallel ranks exchange their shards of Muon's matrices, which the plan does not contain."""
    facts = cli_runner.command_json(
        "dryrun", run_file, "--ranks", 2, "--trace", "0", "--set", "optimizer.name=muon", exit_code=1
    )
    (line,) = [line for line in facts["ranks"][0]["lines"] if not line["agrees"]]
    assert (line["quantity"], line["planned"]) == ("all_to_all", 0)
    assert "not planned" in line["explanation"]


@pytest.mark.parametrize("ranks", ["4", "0,x", "", "-1", "first"])
def test_dryrun_command_rejects_invalid_ranks_option(ranks: str, run_file: Path) -> None:
    with pytest.raises(UserError, match=r"write all, corners, or numbers from 0 to 3 separated by commas"):
        cli_runner.command_output("dryrun", run_file, "--ranks", 4, "--trace", ranks)


def test_dryrun_command_resolves_auto_layout(run_file: Path) -> None:
    automatic = run_file.with_name("automatic.toml")
    text = run_file.read_text().partition("[layout]")[0]
    text = text.replace("tokens_per_step = 1024", "tokens_per_step = 8192")  # so that buffers are a smaller part
    automatic.write_text(f'layout = "auto"\n{text}[cluster]\npreset = "h100"\nnproc_per_node = 4\n')
    assert cli_runner.command_json("dryrun", automatic, "--trace", "0")["world_size"] == 4

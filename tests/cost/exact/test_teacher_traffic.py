"""Collectives, FLOPs and memory of a teacher's passes: the traced program has those that are planned."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import tomli_w

from phalanx.cost.exact.flops import forward_flops_per_token, rank_flops
from phalanx.cost.exact.traffic import traffic_by_role
from phalanx.spec.files.teacher import resolved_teacher
from phalanx.spec.resolved_run import ResolvedRun
from phalanx.verify.dry_run import trace_ranks
from phalanx.verify.plan_comparison import compare_with_plan
from tests.helpers.dry_run_cases import BF16, DENSE, KINDS, MOE, Table, dry_run_case
from tests.helpers.small_runs import small_run

TEACHER: Table = {**DENSE, "hidden_size": 192, "num_layers": 4, "num_heads": 8, "num_kv_heads": 4}
TEACHERS: dict[str, Table] = {
    "dense": TEACHER,
    "tied": {**TEACHER, "tie_embeddings": True},
    "predicting": {**TEACHER, "mtp": {"layers": 1}},
    "moe": {**MOE, "num_layers": 3},
    "kinds": {**KINDS, "num_layers": 4},
}
CASES: dict[str, tuple[int, str, Table, Table]] = {
    "ddp": (2, "dense", DENSE, {"data_parallel": "ddp"}),
    "zero1": (2, "moe", DENSE, {"data_parallel": "zero1"}),
    "zero3": (3, "predicting", DENSE, {"data_parallel": "zero3", **BF16}),
    "zero3-model-unit": (
        2,
        "dense",
        DENSE,
        {"data_parallel": "zero3", "fsdp_unit": "model", "reshard_after_forward": False},
    ),
    "hsdp": (4, "dense", DENSE, {"data_parallel": "hsdp", "dp_shard": 2}),
    "offload": (2, "dense", DENSE, {"data_parallel": "zero3", "offload": "cpu"}),
    "tp": (4, "moe", DENSE, {"tp": 4}),
    "tp-whole-tokens": (2, "kinds", DENSE, {"tp": 2, "sequence_parallel": False}),
    "tp-zero3": (4, "tied", DENSE, {"tp": 2, "data_parallel": "zero3"}),
    "ring": (2, "dense", DENSE, {"cp": 2}),
    "ulysses": (2, "moe", DENSE, {"cp": 2, "cp_method": "ulysses"}),
    "ep": (2, "moe", MOE, {"ep": 2}),
    "pp-tp": (4, "dense", DENSE, {"pp": 2, "tp": 2}),
    "interleaved": (2, "tied", {**DENSE, "num_layers": 4}, {"pp": 2, "schedule": "interleaved", "virtual_stages": 2}),
    "zb-v-zero3": (
        4,
        "dense",
        {**DENSE, "num_layers": 4},
        {"pp": 2, "schedule": "zb-v", "data_parallel": "zero3"},
    ),
}


def distilled_run(text: Path, folder: Path, case: str) -> ResolvedRun:
    """Return a run whose teacher is a directory with a run file, which plans need only."""
    world_size, teacher, student, layout = CASES[case]
    (folder / "teacher").mkdir()
    (folder / "teacher" / "run.toml").write_text(tomli_w.dumps({"name": "teacher", "model": TEACHERS[teacher]}))
    changes = dry_run_case(world_size, student, **layout)[1]
    run = small_run(text, folder, {**changes, "distillation": {"teacher": str(folder / "teacher")}})
    return ResolvedRun(run, world_size)


@pytest.mark.parametrize("case", CASES)
def test_traced_step_with_teacher_is_as_planned(case: str, text: Path, tmp_path: Path) -> None:
    resolved = distilled_run(text, tmp_path, case)
    (trace,) = trace_ranks(resolved, [resolved.world_size - 1])
    assert [check for check in compare_with_plan(resolved, trace) if not check.agrees] == []


def test_teacher_adds_forward_flops_and_gathers_of_its_weights(text: Path, tmp_path: Path) -> None:
    resolved = distilled_run(text, tmp_path, "hsdp")
    alone = replace(resolved, run=resolved.run.replace(distillation=None))
    teacher = resolved_teacher(resolved)
    assert teacher is not None
    tokens = teacher.run.training.tokens_per_step / teacher.world_size
    flops = rank_flops(resolved, 0) - rank_flops(alone, 0)
    assert flops == pytest.approx(tokens * forward_flops_per_token(teacher.run.model, teacher.run.training.seq_len))
    rows = [row for row in traffic_by_role(resolved)["rank"] if row.purpose.startswith("teacher: ")]
    assert [row.operation for row in rows] == ["all_gather"]
